// What norm.cc calls in norm_cpu.cc.
#pragma once

#include <cstdint>

namespace turbomind {

struct NormRow {
  const float* x;
  void* y;
  bool y_bf16;
  int64_t cols;
  int64_t padded_cols;  // y is zero from cols up to here
  const float* weight;
  float weight_offset;
  float eps;
};

struct NormKernels {
  void (*rms_row)(const NormRow& row);
};

}  // namespace turbomind
