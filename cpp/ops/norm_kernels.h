// The kernels that norm.cc calls: those of norm_cpu.cc and of norm_cuda.cu.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "cuda/types.h"

namespace turbomind {

// ---- CPU: one row.

struct NormRow {
  const float* x;
  void* y;
  bool y_bf16;
  int64_t cols;
  int64_t padded_cols;  // y is zero from cols up to here
  const float* weight;  // null: y is x
  float weight_offset;
  float eps;
};

struct NormKernels {
  void (*rms_row)(const NormRow& row);
};

// ---- GPU.

// Pointers are device memory. The sum's shape depends on `cols` alone.
struct DeviceNorm {
  const float* x = nullptr;       // [rows][x_stride]
  void* y = nullptr;              // [rows][y_stride], of y_dtype
  const float* weight = nullptr;  // [cols]; null: y is x
  int64_t x_stride = 0;           // elements
  int64_t y_stride = 0;
  int32_t rows = 0;
  int32_t cols = 0;    // at most kMaxNormCols
  int32_t padded = 0;  // y is zero from cols up to here
  float weight_offset = 0;
  float eps = 1e-6f;
  DType y_dtype = DType::f32;
};

constexpr int kMaxNormCols = 24576;  // a row lies in shared memory

struct NormCuda {
  // Throws Error(internal) for sizes out of range.
  void (*rms_norm)(StreamHandle stream, const DeviceNorm& norm);
};

// Device bytes that one launch loads and stores.
constexpr int64_t norm_bytes_loaded(const DeviceNorm& n) {
  return int64_t{n.rows} * n.cols * 8;
}
constexpr int64_t norm_bytes_stored(const DeviceNorm& n) {
  return int64_t{n.rows} * n.padded * static_cast<int64_t>(dtype_bytes(n.y_dtype));
}

namespace cuda_emulated {
extern const NormCuda kNormCuda;
}
namespace cuda {  // where nvcc was there
extern const NormCuda kNormCuda;
}

}  // namespace turbomind
