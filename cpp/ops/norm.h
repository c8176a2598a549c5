// Root-mean-square norm over the last dimension. Norms of q and k are part of ops/rope_kv.h.
#pragma once

#include "core/context.h"
#include "core/tensor.h"

namespace turbomind {

struct DeviceNorm;

enum class NormKind : uint8_t { none, rms };

struct Norm {
  NormKind kind = NormKind::none;
  float eps = 1e-6f;
  float weight_offset = 0;        // Gemma adds 1 to its stored weight
  const float* weight = nullptr;  // [cols] float32
};

// y = x / rms(x) * (weight + weight_offset), row by row, or x for kind none, for x [rows, cols]
// float32 and y [rows, cols] float32, bfloat16 or, on a GPU, float16; padded columns of y become
// zero. y may be x. Throws Error(internal) for other types, shapes that differ, and kind rms
// without a weight. See Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019).
void rms_norm(Context& ctx, const Norm& norm, const Mat& x, const Mat& y);
// The same for y = x, float32, whose rows go on after its columns: nothing is padded.
void rms_norm_in_place(Context& ctx, const Norm& norm, const Mat& x);

// Returns what the GPU's kernels take for rms_norm().
DeviceNorm device_norm(const Norm& norm, const Mat& x, const Mat& y);

}  // namespace turbomind
