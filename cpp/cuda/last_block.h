// Reductions across the blocks of one launch, for kernels: each block stores its part in device
// memory, and the last block to arrive continues with all parts.
//
// A counter is zero before a launch and after it, so that a captured graph can be replayed.
#pragma once

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

#ifdef TM_CUDA_EMULATED

// Makes the stores of this block before the fence visible to other blocks before those after it.
TM_DEVICE void device_fence() {
  emulator::device_fence();
}

// Adds atomically and exactly. Returns the value before.
template <typename T>
TM_DEVICE T atomic_add_device(T* p, std::type_identity_t<T> value) {
  static_assert(std::is_unsigned_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
  return static_cast<T>(emulator::atomic_add(p, value, sizeof(T)));
}

#else

TM_DEVICE void device_fence() {
  __threadfence();
}
TM_DEVICE uint32_t atomic_add_device(uint32_t* p, uint32_t value) {
  return atomicAdd(p, value);
}
TM_DEVICE uint64_t atomic_add_device(uint64_t* p, uint64_t value) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  return atomicAdd(reinterpret_cast<unsigned long long*>(p), value);
}

#endif

// Returns true to every thread of the last of `blocks` blocks to call it; that block sees all
// stores that threads of the others made before. `flag` is in the caller's shared memory. It is a
// barrier.
TM_DEVICE bool is_last_block(uint32_t* counter, uint32_t blocks, bool* flag) {
  __syncthreads();  // so the fence of one thread orders the stores of all
  if (threadIdx.x == 0) {
    device_fence();
    *flag = atomic_add_device(counter, 1u) + 1 == blocks;
    device_fence();
    if (*flag) store(counter, 0u);
  }
  __syncthreads();
  return *flag;
}

}  // namespace turbomind::TM_CUDA_NS
