// Exact 64-bit integer arithmetic for kernels: the order of a sum does not change its result.
#pragma once

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

#ifdef TM_CUDA_EMULATED

template <typename T>
TM_DEVICE void atomic_add_shared(T* p, T value) {
  *p += value;
}
TM_DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}

#else

TM_DEVICE void atomic_add_shared(uint32_t* p, uint32_t value) {
  atomicAdd(p, value);
}
// In halves: shared memory has an atomic add of 32 bits; one of 64 bits is a compare-and-swap loop.
TM_DEVICE void atomic_add_shared(uint64_t* p, uint64_t value) {
  uint32_t* halves = reinterpret_cast<uint32_t*>(p);
  const uint32_t low = static_cast<uint32_t>(value);
  const uint32_t carry = atomicAdd(halves, low) > ~low;
  const uint32_t high = static_cast<uint32_t>(value >> 32) + carry;
  if (high != 0) atomicAdd(halves + 1, high);
}
TM_DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
  return __umul64hi(a, b);
}

#endif

}  // namespace turbomind::TM_CUDA_NS
