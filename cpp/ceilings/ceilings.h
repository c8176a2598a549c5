// The best rates of this machine, measured: the denominators of every benchmark.
#pragma once

#include <cstdint>

#include "core/context.h"
#include "linear/epilogue.h"

namespace turbomind {

// Bytes per second of a streaming sum over `buffer_bytes` of 2 MiB pages, split over the pool.
double measure_read(Context& ctx, size_t buffer_bytes, double seconds);
// FLOP per second of register-only products with the ISA's best multiply (tile, bf16 dot or FMA).
double measure_tiles(Context& ctx, double seconds);
// Operations per second of register-only products of bytes (VNNI, maddubs or plain C): what bounds
// quantized weights.
double measure_int8(Context& ctx, double seconds);
// FLOP per second of `linear` on a resident [n, k] weight with m rows. Gated outputs are in the
// type of activations, others float32.
double measure_linear(Context& ctx, const char* weight_format, int64_t m, int64_t n, int64_t k,
                      double seconds, Epilogue epilogue = Epilogue::store);

}  // namespace turbomind
