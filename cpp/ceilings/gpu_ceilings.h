// What a GPU gives at best: the rates that benchmarks divide by.
#pragma once

#include <cstdint>

#include "cuda/gpu_context.h"

namespace turbomind {

struct GpuCeilings {
  double read = 0;   // bytes per second of a stream that only reads
  double copy = 0;   // of one that copies, bytes read and written
  double flops = 0;  // FLOP per second of a large bfloat16 product, as the context computes it
};

// Streams through `bytes` (at most a quarter of what is free), then multiplies [size, size]
// matrices of random numbers; each for about `seconds`, once clocks had that long to rise. The best
// counts: what disturbs can only make it slower.
GpuCeilings measure_ceilings(GpuContext& gpu, int64_t bytes, int64_t size, double seconds);

// Random bfloat16 numbers, so that any aligned float32 in them is an ordinary number too. They
// repeat every 16 MiB. Waits for the stream.
void fill_random(GpuContext& gpu, void* to, size_t bytes);

}  // namespace turbomind
