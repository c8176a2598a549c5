// Blocks of one launch that work on the same thing: each leaves its part in device memory, and the
// last to arrive goes on with all of them. For kernels.
//
// A counter is zero before a launch and zero again after it, so that a captured graph can be
// replayed.
#pragma once

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

#ifdef TM_CUDA_EMULATED

// The memory operations of this block before it are seen by whoever sees one behind it. The
// emulator runs blocks one after another.
TM_DEVICE void device_fence() {}

// Exact and indivisible. Returns what was there.
template <typename T>
TM_DEVICE T atomic_add_device(T* p, std::type_identity_t<T> value) {
  const T before = load(p);
  store(p, static_cast<T>(before + value));
  return before;
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

// True in every thread of the last of `blocks` blocks to call it, which sees all that the threads
// of the others stored before. `flag` is shared memory of the caller's. A barrier.
TM_DEVICE bool is_last_block(uint32_t* counter, uint32_t blocks, bool* flag) {
  __syncthreads();  // the fence of one thread then speaks for what all of them stored
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
