// The interface of kernels: the functions and types that they may use. For files named *_cuda.cu,
// which are compiled twice: by nvcc into namespace turbomind::cuda, and by the host's compiler into
// turbomind::cuda_emulated, where each CUDA thread is a fiber (cuda/emulator.h). TM_CUDA_NS is the
// namespace of this compilation.
//
//   template <typename T>
//   TM_KERNEL(256, 1) void scale(const ScaleParams p) { ... }
//   launch<scale<Bf16>>(stream, dim3(blocks), 256, shared_bytes, params);
//
// A kernel takes one trivially copyable struct. It may start while the kernel before it in the
// stream still runs (where the device can: compute capability 9.0). So every thread of every kernel
// calls wait_for_previous() before anything else that touches device memory, and also before it
// returns: after a kernel that ended without waiting, its successor could overtake its predecessor.
// Before the wait a kernel may read only memory that no kernel of the same step writes, by
// load_constant and copy_constant16: weights, tables, and the step's arrays, which a copy writes.
// The emulator reports violations of these rules.
//
// Both builds provide
// - wait_for_previous(): waits until all kernels before this one have ended and their stores are
//   visible;
// - let_next_start(): allows blocks of the next kernel to take free places, where they wait in
// turn.
//   A kernel calls it first of all;
// - threadIdx, blockIdx, blockDim, gridDim (one-dimensional blocks of whole warps), dim3, uint2,
//   uint4, int2, int4, float2, float4 with their make_ functions;
// - __syncthreads, __syncwarp, __shfl_sync, __shfl_xor_sync, __shfl_up_sync, __shfl_down_sync,
//   __ballot_sync, __any_sync, __all_sync with full masks, by all 32 lanes;
// - T* shared_memory<T>(): the block's dynamic shared memory, aligned to 128 bytes; there is no
//   other, and its contents are undefined at the start of a block;
// - T load(const T*), T load_streaming(const T*) (read once by the device and never written by the
//   running kernel: not cached in L1), store(T*, T), for T of 2, 4, 8 or 16 bytes, aligned to its
//   size: every access to device memory is one of these, an atomic_add_device (cuda/last_block.h)
//   or
// - T load_constant(const T*), copy_constant16(shared, global, valid): load and copy_async16 of
//   memory that may be read before the wait, or
// - copy_async16(shared, global, valid) (16 bytes; zeros where not valid, `global` unread),
//   copy_async_commit(), copy_async_wait<N>(): waits for all but the latest N groups of this
//   thread; other threads see them after a barrier;
// - ldmatrix_x2, _x4, _x2_trans, _x4_trans(registers, row of shared memory) and
//   mma16816<T>(c, a, b): the tensor core's m16n8k16 with float32 accumulation;
// - to_float(T), from_float<T>(float) (nearest even), unpack2<T>(uint32_t), pack2<T>(lo, hi) for T
//   of Bf16 and F16; the element of the lower address is the lower half;
// - fma, rsqrt, tanh, fast_exp2, fast_exp, max_number (of a NaN and a number: the number);
// - TM_DEVICE before a function that kernels call.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/types.h"

#ifdef TM_CUDA_EMULATED
#include "cuda/kernel_emulated.h"
#else
#include "cuda/kernel_nvcc.h"
#endif

namespace turbomind::TM_CUDA_NS {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

TM_DEVICE int lane_index() {
  return static_cast<int>(threadIdx.x) % kWarp;
}
TM_DEVICE int warp_index() {
  return static_cast<int>(threadIdx.x) / kWarp;
}

// Returns the sum over the warp to every lane, in a fixed order (a butterfly).
TM_DEVICE float warp_sum(float v) {
  for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}
TM_DEVICE float warp_max(float v) {
  for (int step = kWarp / 2; step > 0; step /= 2)
    v = max_number(v, __shfl_xor_sync(kAllLanes, v, step));
  return v;
}

}  // namespace turbomind::TM_CUDA_NS
