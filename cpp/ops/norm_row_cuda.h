// The norm of a row by a block, for the kernels of norm_cuda.cu and of rank_sum_cuda.cu. At batch 1
// the time is that of one round trip to memory: 256 threads with 4 loads of 16 bytes each in flight
// take a row of 4096 at once. Row and weight stay in registers, so both are read once, and a block
// needs so little shared memory that one of the next product fits beside it.
#pragma once

#include "cuda/four_cuda.h"
#include "cuda/kernel.h"
#include "ops/norm_kernels.h"

namespace turbomind::TM_CUDA_NS {

constexpr int kNormThreads = 256;
constexpr int kNormWarps = kNormThreads / kWarp;
constexpr int kHeld = 4;  // pieces of four columns in a thread's registers
constexpr int kHeldCols = 4 * kNormThreads * kHeld;
constexpr size_t kNormSums = kNormWarps * sizeof(float);  // bytes of shared memory, before a row

// Returns the sum of all threads' v, in every thread.
TM_DEVICE float block_sum(float v, float* sums) {
  v = warp_sum(v);
  if (lane_index() == 0) sums[warp_index()] = v;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kNormWarps; ++w) sum += sums[w];
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
  for (int c = p.cols + threadIdx.x; c < p.padded; c += kNormThreads)
    store_one(result_row<T>(p), c, 0.0f);
}

// Writes the norm of a row that the block's threads hold.
template <typename T>
TM_DEVICE void norm_held(const DeviceNorm& p, const float4 (&v)[kHeld], const float4 (&w)[kHeld]) {
  const int pieces = (p.cols + 3) / 4;  // of four columns
  float4 s = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) s = add_squares(v[j], s);
  const float r = row_factor(p, s);
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = threadIdx.x + j * kNormThreads;
    if (i < pieces) store_four(result_row<T>(p), 4 * i, p.cols, scaled(p, v[j], r, w[j]));
  }
  zero_padding<T>(p);
}

TM_DEVICE void load_held_weights(const DeviceNorm& p, float4 (&w)[kHeld]) {
  const int pieces = (p.cols + 3) / 4;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int i = threadIdx.x + j * kNormThreads;
    if (i < pieces) w[j] = load_weights(p, 4 * i);
  }
}

// The same for a row in shared memory; `s` are the squares of this thread's pieces.
template <typename T>
TM_DEVICE void norm_shared(const DeviceNorm& p, const float4* row, const float4& s) {
  const int pieces = (p.cols + 3) / 4;
  const float r = row_factor(p, s);
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kNormThreads) {
    const float4 w = load_weights(p, 4 * i);
    store_four(result_row<T>(p), 4 * i, p.cols, scaled(p, row[i], r, w));
  }
  zero_padding<T>(p);
}
// Where that row begins.
TM_DEVICE float4* shared_row() {
  return reinterpret_cast<float4*>(shared_memory<float>() + kNormWarps);
}
constexpr size_t shared_row_bytes(int cols) {
  return (static_cast<size_t>(cols) + 3) / 4 * sizeof(float4);
}

}  // namespace turbomind::TM_CUDA_NS
