// Fibers: stacks that a host thread switches between. One thread at a time may use them.
#pragma once

#include <cstddef>
#include <cstdint>

// Marks functions that are entered more often than left, so that the thread sanitizer skips them.
#if defined(__SANITIZE_THREAD__)
#define TM_NOT_TRACED __attribute__((no_sanitize("thread")))
#else
#define TM_NOT_TRACED
#endif

namespace turbomind::emulator {

class Fiber {
 public:
  Fiber();  // stands for the stack of the thread that switches away from it
  // `stagger`: spreads the tops of several fibers' stacks over the sets of the cache.
  Fiber(size_t stack_bytes, int stagger);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next switch to this fiber enters entry(), which must not return: it ends with a last switch
  // and is TM_NOT_TRACED, its variables in registers. If frames are abandoned in another way, the
  // fiber must be destroyed, because the sanitizers track its frames.
  void start(void (*entry)());
  // Switches stacks. `last`: `from` is not resumed before the next start().
  static void switch_to(Fiber& from, Fiber& to, bool last = false);

 private:
  static void enter();

  uint8_t* map_ = nullptr;  // a guard page, then the stack
  size_t map_bytes_ = 0;
  void* top_ = nullptr;
  void (*entry_)() = nullptr;
  void* context_ = nullptr;  // where to resume: a stack pointer, or a ucontext_t
  // The rest is for the sanitizers.
  const void* low_ = nullptr;
  size_t low_bytes_ = 0;
  void* fake_stack_ = nullptr;
  void* thread_fiber_ = nullptr;
};

}  // namespace turbomind::emulator
