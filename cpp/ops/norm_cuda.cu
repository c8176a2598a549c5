// A block per row (ops/norm_row_cuda.h).
#include "ops/norm_kernels.h"

#include "core/error.h"
#include "cuda/four_cuda.h"
#include "cuda/kernel.h"
#include "ops/norm_row_cuda.h"

namespace turbomind::TM_CUDA_NS {
namespace {

// Up to 4096 columns. The weight is read before the row is there.
template <typename T>
TM_KERNEL(kNormThreads, 3)
void rms_norm_rows(const TM_GRID_CONSTANT DeviceNorm p) {
  let_next_start();
  const int first = threadIdx.x, pieces = (p.cols + 3) / 4;  // of four columns
  float4 v[kHeld] = {}, w[kHeld] = {};
  load_held_weights(p, w);
  wait_for_previous();
  const float* x = p.x + blockIdx.x * p.x_stride;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = first + j * kNormThreads;
    if (i < pieces) v[j] = load_four(x, 4 * i, p.cols);
  }
  norm_held<T>(p, v, w);
}

// Any width: the row lies in shared memory.
template <typename T>
TM_KERNEL(kNormThreads, 4)
void rms_norm_wide_rows(const TM_GRID_CONSTANT DeviceNorm p) {
  let_next_start();
  wait_for_previous();
  float4* row = shared_row();
  const float* x = p.x + blockIdx.x * p.x_stride;
  const int pieces = (p.cols + 3) / 4;
  float4 s = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kNormThreads) {
    row[i] = load_four(x, 4 * i, p.cols);  // read again by this thread alone
    s = add_squares(row[i], s);
  }
  norm_shared<T>(p, row, s);
}

template <typename T>
void launch_rows(StreamHandle stream, const DeviceNorm& n) {
  const dim3 grid(static_cast<unsigned>(n.rows));
  if (n.cols <= kHeldCols)
    launch<rms_norm_rows<T>>(stream, grid, kNormThreads, kNormSums, n);
  else
    launch<rms_norm_wide_rows<T>>(stream, grid, kNormThreads, kNormSums + shared_row_bytes(n.cols),
                                  n);
}

void rms_norm(StreamHandle stream, const DeviceNorm& n) {
  if (n.cols < 1 || n.cols > kMaxNormCols || n.padded < n.cols || n.x_stride < n.cols ||
      n.y_stride < n.padded)
    throw_error(ErrorCode::internal, "rms_norm: got ", n.cols, " columns padded to ", n.padded,
                " with strides ", n.x_stride, " and ", n.y_stride, ", expected 1 to ", kMaxNormCols,
                " columns in rows that hold them");
  switch (n.y_dtype) {
    case DType::f32:
      return launch_rows<float>(stream, n);
    case DType::bf16:
      return launch_rows<Bf16>(stream, n);
    case DType::f16:
      return launch_rows<F16>(stream, n);
  }
}

}  // namespace

extern const NormCuda kNormCuda;
const NormCuda kNormCuda{rms_norm};

}  // namespace turbomind::TM_CUDA_NS
