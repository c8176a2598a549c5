// Root-mean-square norm over the last dimension.
#pragma once

#include "core/context.h"
#include "core/tensor.h"

namespace turbomind {

enum class NormKind : uint8_t { none, rms };

struct Norm {
  NormKind kind = NormKind::none;
  float eps = 1e-6f;
  float weight_offset = 0;        // Gemma adds 1 to its stored weight
  const float* weight = nullptr;  // [cols] float32
};

// x [rows, cols] float32 -> y [rows, cols] float32 or bfloat16; padded columns of y are set to
// zero.
void rms_norm(Context& ctx, const Norm& norm, const Mat& x, const Mat& y);

}  // namespace turbomind
