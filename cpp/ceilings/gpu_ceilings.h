// The best rates of a GPU, measured: the denominators of benchmarks.
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
// matrices of random numbers; each for about `seconds`, after as long for clocks to rise. The best
// call counts, since disturbances only make it slower. Throws Error(invalid_request) for a `size`
// that is no multiple of 32 up to 32768.
GpuCeilings measure_ceilings(GpuContext& gpu, int64_t bytes, int64_t size, double seconds);

// Random bfloat16 numbers, so that any aligned float32 in them is an ordinary number too. They
// repeat every 16 MiB. Waits for the stream.
void fill_random(GpuContext& gpu, void* to, size_t bytes);

}  // namespace turbomind
