// A block per row. At batch 1 the time is that of one round trip to memory: 256 threads with 4
// loads of 16 bytes each in flight take a row of 4096 at once. Row and weight stay in registers, so
// both are read once, the weight before the row is there, and a block needs so little shared memory
// that one of the next product fits beside it.
#include "ops/norm_kernels.h"

#include "core/error.h"
#include "cuda/four_cuda.h"
#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHeld = 4;  // pieces of four columns in a thread's registers

// Returns the sum of all threads' v, in every thread.
TM_DEVICE float block_sum(float v, float* sums) {
  v = warp_sum(v);
  if (lane_index() == 0) sums[warp_index()] = v;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += sums[w];
  return sum;
}

TM_DEVICE float4 load_weights(const DeviceNorm& p, int c) {
  return p.weight ? load_four<true>(p.weight, c, p.cols) : make_float4(1, 1, 1, 1);
}

// Four columns of the result.
TM_DEVICE float4 scaled(const DeviceNorm& p, const float4& v, float r, const float4& w) {
  return make_float4((v.x * r) * (w.x + p.weight_offset), (v.y * r) * (w.y + p.weight_offset),
                     (v.z * r) * (w.z + p.weight_offset), (v.w * r) * (w.w + p.weight_offset));
}

TM_DEVICE float4 add_squares(const float4& v, const float4& s) {
  return make_float4(fma(v.x, v.x, s.x), fma(v.y, v.y, s.y), fma(v.z, v.z, s.z),
                     fma(v.w, v.w, s.w));
}

// Returns the factor of a row, from its threads' squares.
TM_DEVICE float row_factor(const DeviceNorm& p, const float4& s) {
  const float sum = block_sum((s.x + s.y) + (s.z + s.w), shared_memory<float>());
  if (!p.weight) return 1;
  return 1.0f / sqrtf(sum / static_cast<float>(p.cols) + p.eps);
}

template <typename T>
TM_DEVICE T* result_row(const DeviceNorm& p) {
  return static_cast<T*>(p.y) + blockIdx.x * p.y_stride;
}

template <typename T>
TM_DEVICE void zero_padding(const DeviceNorm& p) {
  for (int c = p.cols + threadIdx.x; c < p.padded; c += kThreads)
    store_one(result_row<T>(p), c, 0.0f);
}

// Up to 4096 columns.
template <typename T>
TM_KERNEL(kThreads, 3)
void rms_norm_rows(const TM_GRID_CONSTANT DeviceNorm p) {
  let_next_start();
  const int first = threadIdx.x, pieces = (p.cols + 3) / 4;  // of four columns
  float4 v[kHeld] = {}, w[kHeld] = {};
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = first + j * kThreads;
    if (i < pieces) w[j] = load_weights(p, 4 * i);
  }
  wait_for_previous();
  const float* x = p.x + blockIdx.x * p.x_stride;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = first + j * kThreads;
    if (i < pieces) v[j] = load_four(x, 4 * i, p.cols);
  }
  float4 s = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) s = add_squares(v[j], s);
  const float r = row_factor(p, s);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = first + j * kThreads;
    if (i < pieces) store_four(result_row<T>(p), 4 * i, p.cols, scaled(p, v[j], r, w[j]));
  }
  zero_padding<T>(p);
}

// Any width: the row lies in shared memory.
template <typename T>
TM_KERNEL(kThreads, 4)
void rms_norm_wide_rows(const TM_GRID_CONSTANT DeviceNorm p) {
  let_next_start();
  wait_for_previous();
  float4* row = reinterpret_cast<float4*>(shared_memory<float>() + kWarps);
  const float* x = p.x + blockIdx.x * p.x_stride;
  const int pieces = (p.cols + 3) / 4;
  float4 s = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    row[i] = load_four(x, 4 * i, p.cols);  // read again by this thread alone
    s = add_squares(row[i], s);
  }
  const float r = row_factor(p, s);
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    const float4 w = load_weights(p, 4 * i);
    store_four(result_row<T>(p), 4 * i, p.cols, scaled(p, row[i], r, w));
  }
  zero_padding<T>(p);
}

template <typename T>
void launch_rows(StreamHandle stream, const DeviceNorm& n) {
  const dim3 grid(static_cast<unsigned>(n.rows));
  constexpr size_t kSums = kWarps * sizeof(float);
  const size_t row = (static_cast<size_t>(n.cols) + 3) / 4 * sizeof(float4);
  if (n.cols <= 4 * kThreads * kHeld)
    launch<rms_norm_rows<T>>(stream, grid, kThreads, kSums, n);
  else
    launch<rms_norm_wide_rows<T>>(stream, grid, kThreads, kSums + row, n);
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
