#include "ops/gate.h"

#include <algorithm>

#include "core/error.h"
#include "cpu/isa_dispatch.h"
#include "cuda/dispatch.h"
#include "cuda/gpu_context.h"
#include "ops/dispatch.h"
#include "ops/gate_kernels.h"

namespace turbomind {

TM_KERNEL_TABLE(GateKernels, gate_kernels)
TM_GPU_TABLE(GateCuda, kGateCuda, gate_cuda)

namespace {

constexpr int64_t kElementsPerTask = 4096;

constexpr OpTypes kGateTypes{"multiply_gate", "gate", {DType::f32}, {DType::f32}};
constexpr OpTypes kUpTypes{"multiply_gate", "up", {DType::f32}, {DType::f32}};
constexpr OpTypes kYTypes{
    "multiply_gate", "y", {DType::f32, DType::bf16}, {DType::f32, DType::f16, DType::bf16}};

void check(const Context& ctx, Epilogue epilogue, const Mat& gate, const Mat& up, const Mat& y) {
  if (epilogue != Epilogue::silu_mul && epilogue != Epilogue::gelu_mul) {
    throw_error(ErrorCode::internal, "multiply_gate: got epilogue ", static_cast<int>(epilogue),
                ", expected silu_mul or gelu_mul");
  }
  check_dtype(ctx, kGateTypes, gate.dtype);
  check_dtype(ctx, kUpTypes, up.dtype);
  check_dtype(ctx, kYTypes, y.dtype);
  for (const Mat* m : {&gate, &up}) {
    if (m->rows != y.rows || m->cols != y.cols)
      throw_error(ErrorCode::internal, "multiply_gate: ", m == &up ? "up" : "gate", " is [",
                  m->rows, ", ", m->cols, "] but y is [", y.rows, ", ", y.cols, "]");
  }
}

int64_t padded(const Mat& y) {
  return std::min(padded_cols(y.cols), std::max(y.stride, y.cols));
}

void on_gpu(GpuContext& gpu, Epilogue epilogue, const Mat& gate, const Mat& up, const Mat& y) {
  DeviceGate g;
  g.gate = gate.f32(0);
  g.up = up.f32(0);
  g.y = y.data;
  g.gate_stride = gate.stride;
  g.up_stride = up.stride;
  g.y_stride = y.stride;
  g.rows = static_cast<int32_t>(y.rows);
  g.cols = static_cast<int32_t>(y.cols);
  g.padded = static_cast<int32_t>(padded(y));
  g.epilogue = epilogue;
  g.y_dtype = y.dtype;
  gate_cuda(gpu.kind()).multiply(gpu.handle(), g);
}

void on_cpu(Context& ctx, Epilogue epilogue, const Mat& gate, const Mat& up, const Mat& y) {
  const GateKernels& kernels = gate_kernels(ctx.isa);
  const bool bf16 = y.dtype == DType::bf16;
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, y.cols));
  ctx.pool.parallel_for(y.rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      void* out = bf16 ? static_cast<void*>(y.u16(r)) : static_cast<void*>(y.f32(r));
      kernels.multiply_row({gate.f32(r), up.f32(r), out, bf16, y.cols, padded(y), epilogue});
    }
  });
}

}  // namespace

void multiply_gate(Context& ctx, Epilogue epilogue, const Mat& gate, const Mat& up, const Mat& y) {
  check(ctx, epilogue, gate, up, y);
  if (y.rows == 0) return;
  const double elements = static_cast<double>(y.rows) * static_cast<double>(y.cols);
  const ProfileScope scope(ctx.profiler, Op::other,
                           elements * static_cast<double>(8 + dtype_bytes(y.dtype)), 10 * elements,
                           ctx.profiler.device);
  dispatch(ctx, on_cpu, on_gpu, epilogue, gate, up, y);
}

}  // namespace turbomind
