// Runs the threads of one block, warps from barrier to barrier. Internal to the emulator.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/emulated_memory.h"
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

class BlockRun {
 public:
  // Before the blocks of a launch. `host`, the fiber that calls advance(), and `random` outlive it.
  void prepare(const Launch& launch, Fiber& host, Random& random);
  void start(const Dim3& index);
  // Runs to the next barrier of the block or pause of a thread. Returns false at the block's end,
  // which may be an error.
  bool advance();
  bool held() const { return held_; }
  void release() { held_ = false; }
  // After an error the block's threads are abandoned, and the object must be destroyed.
  const std::string& error() const { return error_; }
  bool not_ready() const { return not_ready_; }  // the error is that of NotReady
  int64_t bytes_stored() const { return block_.bytes_stored; }
  // Frees the shared memory; returns the counters of all blocks since prepare().
  const Block& finish();
  BlockView take_view() { return std::exchange(view_, {}); }

  // For the running thread. arrive() suspends it until its warp has arrived at the same point.
  void arrive(Point point);
  void pause();  // the block may be held from then on
  BlockView& view() { return view_; }
  int phase() const { return phase_; }

 private:
  struct FreeDeleter {
    void operator()(void* p) const { std::free(p); }
  };

  static void thread_main();
  Fiber* run_thread(Thread& me);
  void make_threads(int count);
  void run_warp(Warp& warp);
  void resume(Thread& thread);
  bool end_phase();
  static Thread* next_lane(const Thread& me);
  static void check_together(const Thread& me);
  void complete(Thread& me);
  void shuffle_warps();

  const Launch* launch_ = nullptr;
  Fiber* host_ = nullptr;
  Random* random_ = nullptr;
  Block block_;
  std::unique_ptr<void, FreeDeleter> shared_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Warp> warps_;
  std::vector<int> order_;  // of the warps, in this phase
  size_t next_ = 0;         // in order_
  Thread* paused_ = nullptr;
  bool held_ = false;
  int phase_ = 0;  // barriers of the block so far
  BlockView view_;
  std::string error_;
  bool not_ready_ = false;
};

}  // namespace turbomind::emulator
