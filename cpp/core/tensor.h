// A non-owning view of a row-major matrix of activations, and the padding of its rows.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace turbomind {

// `stride` is in elements. Rows of activations that feed `linear` are padded with zeros up to
// `padded_cols(cols)` elements, so kernels may read whole K blocks.
struct Mat {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  template <typename T>
  T* row(int64_t r) const {
    return static_cast<T*>(data) + r * stride;
  }
  Mat some_rows(int64_t begin, int64_t count) const {
    return {row<uint8_t>(0) + begin * stride * static_cast<int64_t>(dtype_bytes(dtype)), dtype,
            count, cols, stride};
  }
  float* f32(int64_t r) const { return row<float>(r); }
  uint16_t* u16(int64_t r) const { return row<uint16_t>(r); }
};

// Kernels read K in blocks of 32 elements (one bf16 tile row is 64 bytes).
constexpr int64_t kKBlock = 32;
constexpr int64_t round_up(int64_t n, int64_t m) {
  return (n + m - 1) / m * m;
}
constexpr int64_t padded_cols(int64_t cols) {
  return round_up(cols, kKBlock);
}

}  // namespace turbomind
