// A block per row. At batch 1 the time is that of one round trip to memory: 256 threads with 4
// loads of 16 bytes each in flight take a row of 4096 at once; the row stays in shared memory, so x
// and the weight are read once.
#include "ops/norm_cuda.h"

#include "core/error.h"
#include "cuda/four_cuda.h"
#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Of all threads' v, in every thread.
TM_DEVICE float block_sum(float v, float* sums) {
  v = warp_sum(v);
  if (lane_index() == 0) sums[warp_index()] = v;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += sums[w];
  return sum;
}

template <typename T>
TM_KERNEL(kThreads, 4)
void rms_norm_rows(const TM_GRID_CONSTANT DeviceNorm p) {
  float* sums = shared_memory<float>();
  float4* row = reinterpret_cast<float4*>(sums + kWarps);
  const float* x = p.x + blockIdx.x * p.x_stride;
  T* y = static_cast<T*>(p.y) + blockIdx.x * p.y_stride;
  const int pieces = (p.cols + 3) / 4;  // of four columns; the last one may be a part

  float4 s = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    const float4 v = load_four(x, 4 * i, p.cols);
    row[i] = v;  // read again by this thread alone
    s = make_float4(fma(v.x, v.x, s.x), fma(v.y, v.y, s.y), fma(v.z, v.z, s.z), fma(v.w, v.w, s.w));
  }
  const float sum = block_sum((s.x + s.y) + (s.z + s.w), sums);
  const float r = 1.0f / sqrtf(sum / static_cast<float>(p.cols) + p.eps);
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    const float4 v = row[i], w = load_four(p.weight, 4 * i, p.cols);
    const float4 out =
        make_float4((v.x * r) * (w.x + p.weight_offset), (v.y * r) * (w.y + p.weight_offset),
                    (v.z * r) * (w.z + p.weight_offset), (v.w * r) * (w.w + p.weight_offset));
    store_four(y, 4 * i, p.cols, out);
  }
  for (int c = p.cols + threadIdx.x; c < p.padded; c += kThreads) store_one(y, c, 0.0f);
}

void rms_norm(StreamHandle stream, const DeviceNorm& n) {
  if (n.cols < 1 || n.cols > kMaxNormCols || n.padded < n.cols || n.x_stride < n.cols ||
      n.y_stride < n.padded)
    throw_error(ErrorCode::internal, "rms_norm: got ", n.cols, " columns padded to ", n.padded,
                " with strides ", n.x_stride, " and ", n.y_stride, ", expected 1 to ", kMaxNormCols,
                " columns in rows that hold them");
  const dim3 grid(static_cast<unsigned>(n.rows));
  const size_t shared = (kWarps + (static_cast<size_t>(n.cols) + 3) / 4 * 4) * sizeof(float);
  switch (n.y_dtype) {
    case DType::f32:
      return launch<rms_norm_rows<float>>(stream, grid, kThreads, shared, n);
    case DType::bf16:
      return launch<rms_norm_rows<Bf16>>(stream, grid, kThreads, shared, n);
    case DType::f16:
      return launch<rms_norm_rows<F16>>(stream, grid, kThreads, shared, n);
  }
}

}  // namespace

extern const NormCuda kNormCuda;
const NormCuda kNormCuda{rms_norm};

}  // namespace turbomind::TM_CUDA_NS
