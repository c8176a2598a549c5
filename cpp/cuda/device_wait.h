// Waits of a kernel for kernels of other devices, which raise counters in memory that all of them
// read.
//
// A kernel that waits holds multiprocessors of its device, so what it waits for must be able to run
// meanwhile. Kernels of one device wait for each other in checks alone: in streams of their own, a
// few blocks at a time, and while no kernel takes places before its turn.
#pragma once

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

#ifdef TM_CUDA_EMULATED

// Makes what this kernel's predecessors have stored, and what this thread has seen, visible to a
// thread of another device that waits for the count. A launch may be run again until its waits
// succeed, so a second post of the same count must change nothing.
TM_DEVICE void post_count(uint32_t* counter, uint32_t count) {
  emulator::post_count(counter, count);
}

// Returns whether *counter reaches `count`, counted modulo 2^32, before *stop is other than 0 and
// within the limit. What was visible to the poster is then visible to this thread, and after a
// barrier to its block.
TM_DEVICE bool wait_for_count(const uint32_t* counter, uint32_t count, const uint32_t* stop,
                              uint64_t) {
  return emulator::wait_for_count(counter, count, stop);
}

// Returns a word as the host and other devices have last stored it.
TM_DEVICE uint32_t load_system(const uint32_t* p) {
  return load(p);
}

#else

TM_DEVICE void post_count(uint32_t* counter, uint32_t count) {
  store_release_system(counter, count);
}

TM_DEVICE bool wait_for_count(const uint32_t* counter, uint32_t count, const uint32_t* stop,
                              uint64_t limit_ns) {
  constexpr int kPollsPerLook = 64;  // at the clock and at *stop, which lies in host memory
  const uint64_t begin = nanoseconds();
  for (;;) {
    for (int i = 0; i < kPollsPerLook; ++i)
      if (static_cast<int32_t>(load_acquire_system(counter) - count) >= 0) return true;
    if (load_acquire_system(stop) != 0 || nanoseconds() - begin > limit_ns) return false;
  }
}

TM_DEVICE uint32_t load_system(const uint32_t* p) {
  return load_acquire_system(p);
}

#endif

}  // namespace turbomind::TM_CUDA_NS
