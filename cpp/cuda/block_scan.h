// Reductions and scans over the threads of a block, for kernels. Every thread of the block calls
// them.
#pragma once

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

constexpr int kMaxWarps = 32;

// One value per warp, between the two barriers of a collective.
template <class T>
struct WarpValues {
  T value[kMaxWarps];
};

// Returns f(f(a, b), c)... over the values of all threads, to every thread. `f` is commutative and
// exact (integers, maxima), so the order of the reduction does not change the result.
template <class T, class F>
TM_DEVICE T block_reduce(T v, WarpValues<T>& shared, F f) {
  const int lane = lane_index(), warp = warp_index();
  for (int step = kWarp / 2; step > 0; step /= 2) v = f(v, __shfl_xor_sync(kAllLanes, v, step));
  __syncthreads();  // all threads have read the values of the collective before
  if (lane == 0) shared.value[warp] = v;
  __syncthreads();
  v = shared.value[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / kWarp; ++w) v = f(v, shared.value[w]);
  return v;
}

// Returns the sum of the values of all threads before this one; `total` gets the sum of all.
template <class T>
TM_DEVICE T block_scan_before(T v, WarpValues<T>& shared, T* total) {
  const int lane = lane_index(), warp = warp_index();
  T sum = v;
  for (int step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == kWarp - 1) shared.value[warp] = sum;
  __syncthreads();
  T before = 0, all = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) {
    if (w < warp) before += shared.value[w];
    all += shared.value[w];
  }
  *total = all;
  return before + sum - v;
}

}  // namespace turbomind::TM_CUDA_NS
