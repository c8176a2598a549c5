// The norm of one row, shared by the ops that norm. For files compiled once per instruction set.
#pragma once

#include "cpu/vec.h"

namespace turbomind::TM_ISA_NS {

TM_INLINE float inverse_sqrt(float x) {
  return 1.0f / __builtin_sqrtf(x);
}

// 1 / rms of x[0..cols). Four partial sums whose shape depends on cols alone.
TM_INLINE float inverse_rms(const float* x, int64_t cols, float eps) {
  VecF s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
  int64_t c = 0;
  for (; c + 4 * kLanes <= cols; c += 4 * kLanes) {
    const VecF a0 = load(x + c), a1 = load(x + c + kLanes);
    const VecF a2 = load(x + c + 2 * kLanes), a3 = load(x + c + 3 * kLanes);
    s0 = fma(a0, a0, s0);
    s1 = fma(a1, a1, s1);
    s2 = fma(a2, a2, s2);
    s3 = fma(a3, a3, s3);
  }
  for (; c < cols; c += kLanes) {
    const int n = cols - c < kLanes ? static_cast<int>(cols - c) : kLanes;
    const VecF a = load_n(x + c, n);
    s0 = fma(a, a, s0);
  }
  const float sum = reduce_add((s0 + s1) + (s2 + s3));
  return inverse_sqrt(sum / static_cast<float>(cols) + eps);
}

// In place: x = x / rms(x) * (weight + offset).
TM_INLINE void rms_norm_in_place(float* x, int64_t cols, const float* weight, float offset,
                                 float eps) {
  const VecF r = broadcast(inverse_rms(x, cols, eps)), off = broadcast(offset);
  for (int64_t c = 0; c < cols; c += kLanes) {
    const int n = cols - c < kLanes ? static_cast<int>(cols - c) : kLanes;
    store_n(x + c, (load_n(x + c, n) * r) * (load_n(weight + c, n) + off), n);
  }
}

// In place: x = x / rms(x).
TM_INLINE void scale_to_unit_rms(float* x, int64_t cols, float eps) {
  const VecF r = broadcast(inverse_rms(x, cols, eps));
  for (int64_t c = 0; c < cols; c += kLanes) {
    const int n = cols - c < kLanes ? static_cast<int>(cols - c) : kLanes;
    store_n(x + c, load_n(x + c, n) * r, n);
  }
}

}  // namespace turbomind::TM_ISA_NS
