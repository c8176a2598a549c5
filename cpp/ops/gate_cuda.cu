// A thread takes four columns, a block 256 of them in a row.
#include "cuda/four_cuda.h"
#include "cuda/kernel.h"
#include "linear/linear_parts_cuda.h"
#include "ops/gate_kernels.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = 256;
constexpr int kColsPerBlock = 4 * kThreads;

TM_DEVICE float activated(Epilogue epilogue, float x) {
  return epilogue == Epilogue::gelu_mul ? gelu_tanh(x) : silu(x);
}

template <typename T>
TM_KERNEL(kThreads, 4)
void multiply_gate_rows(const TM_GRID_CONSTANT DeviceGate p) {
  let_next_start();
  wait_for_previous();
  const int c = blockIdx.y * kColsPerBlock + 4 * threadIdx.x;
  if (c >= p.padded) return;
  const float4 gate = load_four(p.gate + blockIdx.x * p.gate_stride, c, p.cols);
  const float4 up = load_four(p.up + blockIdx.x * p.up_stride, c, p.cols);
  // Columns from p.cols on were loaded as zeros, and the activation of zero is zero.
  store_four(
      static_cast<T*>(p.y) + blockIdx.x * p.y_stride, c, p.padded,
      make_float4(activated(p.epilogue, gate.x) * up.x, activated(p.epilogue, gate.y) * up.y,
                  activated(p.epilogue, gate.z) * up.z, activated(p.epilogue, gate.w) * up.w));
}

void launch_rows(StreamHandle stream, const DeviceGate& g) {
  const dim3 grid(static_cast<unsigned>(g.rows),
                  static_cast<unsigned>((g.padded + kColsPerBlock - 1) / kColsPerBlock));
  switch (g.y_dtype) {
    case DType::f32:
      return launch<multiply_gate_rows<float>>(stream, grid, kThreads, 0, g);
    case DType::bf16:
      return launch<multiply_gate_rows<Bf16>>(stream, grid, kThreads, 0, g);
    case DType::f16:
      return launch<multiply_gate_rows<F16>>(stream, grid, kThreads, 0, g);
  }
}

}  // namespace

extern const GateCuda kGateCuda;
const GateCuda kGateCuda{launch_rows};

}  // namespace turbomind::TM_CUDA_NS
