// The kernels of ops/rows.h on a GPU.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace turbomind {

// Row i of y is row rows[i] of x; a negative index, padding, gives zeros. Pointers are device
// memory; strides and bytes are multiples of 2, and of 16 for speed.
struct DeviceGather {
  const void* x = nullptr;
  const int32_t* rows = nullptr;  // [count]
  void* y = nullptr;
  int64_t x_stride = 0;  // bytes
  int64_t y_stride = 0;
  int32_t row_bytes = 0;
  int32_t count = 0;
};

// x [rows, cols] += scale * y, float32, each a fused multiply-add, then x *= *factor unless that is
// null.
struct DeviceScaledAdd {
  float* x = nullptr;
  const float* y = nullptr;
  int64_t x_stride = 0;  // elements
  int64_t y_stride = 0;
  int32_t rows = 0;
  int32_t cols = 0;
  float scale = 1;
  const float* factor = nullptr;  // device memory
};

// x [rows, cols] = scale * x, then cap * tanh(x / cap) unless cap is 0; in place.
struct DeviceScaleCap {
  float* x = nullptr;
  int64_t stride = 0;  // elements
  int32_t rows = 0;
  int32_t cols = 0;
  float scale = 1;
  float cap = 0;
};

struct RowsCuda {
  void (*gather)(StreamHandle stream, const DeviceGather& gather);
  void (*scaled_add)(StreamHandle stream, const DeviceScaledAdd& add);
  void (*scale_and_cap)(StreamHandle stream, const DeviceScaleCap& cap);
};

namespace cuda_emulated {
extern const RowsCuda kRowsCuda;
}
namespace cuda {  // where nvcc was there
extern const RowsCuda kRowsCuda;
}

}  // namespace turbomind
