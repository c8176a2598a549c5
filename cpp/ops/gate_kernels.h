// The kernels that gate.cc calls: those of gate_cpu.cc and of gate_cuda.cu.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "cuda/types.h"
#include "linear/epilogue.h"

namespace turbomind {

// ---- CPU: one row.

struct GateRow {
  const float* gate;
  const float* up;
  void* y;
  bool y_bf16;
  int64_t cols;
  int64_t padded_cols;  // y is zero from cols up to here
  Epilogue epilogue;
};

struct GateKernels {
  void (*multiply_row)(const GateRow& row);
};

// ---- GPU.

// Pointers are device memory, strides are in elements.
struct DeviceGate {
  const float* gate = nullptr;
  const float* up = nullptr;
  void* y = nullptr;  // of y_dtype
  int64_t gate_stride = 0;
  int64_t up_stride = 0;
  int64_t y_stride = 0;
  int32_t rows = 0;
  int32_t cols = 0;
  int32_t padded = 0;  // y is zero from cols up to here
  Epilogue epilogue = Epilogue::silu_mul;
  DType y_dtype = DType::f32;
};

struct GateCuda {
  void (*multiply)(StreamHandle stream, const DeviceGate& gate);
};

namespace cuda_emulated {
extern const GateCuda kGateCuda;
}
namespace cuda {  // where nvcc was there
extern const GateCuda kGateCuda;
}

}  // namespace turbomind
