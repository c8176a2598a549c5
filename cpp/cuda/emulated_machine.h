// Runs a launch: blocks one after another, warps from barrier to barrier. Internal to the emulator.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/emulated_thread.h"

namespace turbomind::emulator {

inline uint64_t mix(uint64_t x) {  // splitmix64's finalizer
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mix(seed)) {}
  uint32_t below(uint32_t n) {
    state_ = mix(state_);
    return static_cast<uint32_t>((state_ >> 32) * n >> 32);
  }

 private:
  uint64_t state_;
};

class Machine {
 public:
  LaunchCounters run(const Launch& launch, uint64_t seed);
  // Suspends the running thread until its warp has arrived at the same point.
  void arrive(Point point);

 private:
  static void thread_main();
  Fiber* run_thread(Thread& me);
  void prepare(const Launch& launch);
  void run_block();
  void run_warp(Warp& warp);
  void check_phase();
  static Thread* next_lane(const Thread& me);
  static void check_together(const Thread& me);
  void complete(Thread& me);
  void switch_to(Fiber& from, Thread& to) {
    current_lane = &to;
    Fiber::switch_to(from, to.fiber);
  }

  const Launch* launch_ = nullptr;
  Fiber* host_ = nullptr;  // the thread that launched
  Block block_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::vector<int> order_;
  Random random_{0};
  std::string error_;
};

}  // namespace turbomind::emulator
