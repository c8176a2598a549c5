// Loads and stores of four neighbouring columns of a row, for any alignment and length of the row.
// For kernels (files named *_cuda.cu).
#pragma once

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

template <typename T>
TM_DEVICE void store_one(T* row, int c, float v) {
  if constexpr (std::is_same_v<T, float>)
    store(row + c, v);
  else
    store(row + c, from_float<T>(v));
}

template <typename T>
TM_DEVICE bool whole_four(const T* p, int c, int cols) {
  return c + 4 <= cols && reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T)) == 0;
}

template <bool kConstant, typename T>
TM_DEVICE T load_as(const T* p) {
  if constexpr (kConstant)
    return load_constant(p);
  else
    return load(p);
}

// Returns columns c to c + 3, with zeros from `cols` on.
template <bool kConstant = false>
TM_DEVICE float4 load_four(const float* row, int c, int cols) {
  const auto at = [&](int i) { return c + i < cols ? load_as<kConstant>(row + c + i) : 0.0f; };
  if (whole_four(row + c, c, cols))
    return load_as<kConstant>(reinterpret_cast<const float4*>(row + c));
  return make_float4(at(0), at(1), at(2), at(3));
}

// Stores columns c to c + 3 and skips those from `cols` on.
template <typename T>
TM_DEVICE void store_four(T* row, int c, int cols, float4 v) {
  if (whole_four(row + c, c, cols)) {
    if constexpr (std::is_same_v<T, float>)
      store(reinterpret_cast<float4*>(row + c), v);
    else
      store(reinterpret_cast<uint2*>(row + c), make_uint2(pack2<T>(v.x, v.y), pack2<T>(v.z, v.w)));
    return;
  }
  store_one(row, c, v.x);
  if (c + 1 < cols) store_one(row, c + 1, v.y);
  if (c + 2 < cols) store_one(row, c + 2, v.z);
  if (c + 3 < cols) store_one(row, c + 3, v.w);
}

}  // namespace turbomind::TM_CUDA_NS
