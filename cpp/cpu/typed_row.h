// Rows of float32 or bfloat16, as their reader wants them. For files compiled once per instruction
// set.
#pragma once

#include <cstdint>

#include "cpu/vec.h"

namespace turbomind::TM_ISA_NS {

// Stores n <= kLanes elements of y from element `at` on.
TM_INLINE void store_typed_n(void* y, bool is_bf16, int64_t at, VecF v, int n) {
  if (is_bf16) {
    store_bf16_n(static_cast<uint16_t*>(y) + at, v, n);
  } else {
    store_n(static_cast<float*>(y) + at, v, n);
  }
}

// Sets elements [begin, end) of y to zero.
TM_INLINE void zero_typed(void* y, bool is_bf16, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) {
    if (is_bf16) {
      static_cast<uint16_t*>(y)[c] = 0;
    } else {
      static_cast<float*>(y)[c] = 0;
    }
  }
}

}  // namespace turbomind::TM_ISA_NS
