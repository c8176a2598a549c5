#include "cuda/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "core/error.h"

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace turbomind::emulator {

namespace {

// Source and target of the current switch, for the first instructions on a new stack.
Fiber* switching_from = nullptr;
Fiber* switching_to = nullptr;

}  // namespace

#if defined(__x86_64__)

// Saves the registers that a call preserves on the current stack and resumes the other stack.
extern "C" void tm_switch_stack(void** save, void* load);
asm(R"(
  .text
  .p2align 4
  .globl tm_switch_stack
  .hidden tm_switch_stack
  .type tm_switch_stack, @function
tm_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size tm_switch_stack, .-tm_switch_stack
)");

void Fiber::start(void (*entry)()) {
  entry_ = entry;
  void** sp = static_cast<void**>(top_);
  *--sp = nullptr;  // enter() has no caller
  *--sp = reinterpret_cast<void*>(&Fiber::enter);
  for (int saved = 0; saved < 6; ++saved) *--sp = nullptr;
  context_ = sp;
}

static void switch_context(void** from, void* to) {
  tm_switch_stack(from, to);
}

#else

void Fiber::start(void (*entry)()) {
  entry_ = entry;
  if (!context_) context_ = new ucontext_t;
  ucontext_t* context = static_cast<ucontext_t*>(context_);
  getcontext(context);
  context->uc_stack.ss_sp = const_cast<void*>(low_);
  context->uc_stack.ss_size = low_bytes_;
  context->uc_link = nullptr;
  makecontext(context, &Fiber::enter, 0);
}

static void switch_context(void** from, void* to) {
  if (!*from) *from = new ucontext_t;
  swapcontext(static_cast<ucontext_t*>(*from), static_cast<ucontext_t*>(to));
}

#endif

Fiber::Fiber() {
#if defined(__SANITIZE_THREAD__)
  thread_fiber_ = __tsan_get_current_fiber();
#endif
}

namespace {

// Stacks of fibers that are gone, for the next ones: a launch that waits for another stream throws
// its blocks' fibers away each time that it is tried.
class Stacks {
 public:
  static Stacks& get() {
    static Stacks& stacks = *new Stacks;  // never destroyed: threads may still run at exit
    return stacks;
  }
  // Returns a guard page and a stack behind it.
  uint8_t* take(size_t bytes, size_t guard) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<uint8_t*>& kept = kept_[bytes];
      if (!kept.empty()) {
        uint8_t* const map = kept.back();
        kept.pop_back();
        return map;
      }
    }
    void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED || mprotect(map, guard, PROT_NONE) != 0)
      throw_error(ErrorCode::internal, "no memory for the ", bytes, " bytes of a fiber's stack");
    return static_cast<uint8_t*>(map);
  }
  void give_back(uint8_t* map, size_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    std::vector<uint8_t*>& kept = kept_[bytes];
    try {
      if (kept.size() < kMost) return kept.push_back(map);
    } catch (const std::bad_alloc&) {  // it is unmapped instead
    }
    munmap(map, bytes);
  }

 private:
  static constexpr size_t kMost = 2048;  // of a size: two blocks of the largest kind

  std::mutex mutex_;
  std::map<size_t, std::vector<uint8_t*>> kept_;  // by size
};

}  // namespace

Fiber::Fiber(size_t stack_bytes, int stagger) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  map_bytes_ = page + (stack_bytes + page - 1) / page * page;
  map_ = Stacks::get().take(map_bytes_, page);
  const size_t spread = static_cast<size_t>(stagger % 32) * 192;
  low_ = map_ + page;
  low_bytes_ = map_bytes_ - page - spread;
  top_ = map_ + page + low_bytes_;
#if defined(__SANITIZE_THREAD__)
  thread_fiber_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if !defined(__x86_64__)
  delete static_cast<ucontext_t*>(context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
  if (map_) __asan_unpoison_memory_region(low_, low_bytes_);
#endif
#if defined(__SANITIZE_THREAD__)
  if (map_) __tsan_destroy_fiber(thread_fiber_);
#endif
  if (map_) Stacks::get().give_back(map_, map_bytes_);
}

TM_NOT_TRACED void Fiber::switch_to(Fiber& from, Fiber& to, [[maybe_unused]] bool last) {
  switching_from = &from;
  switching_to = &to;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &from.fake_stack_, to.low_, to.low_bytes_);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(to.thread_fiber_, 0);
#endif
  switch_context(&from.context_, to.context_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(from.fake_stack_, nullptr, nullptr);
#endif
}

TM_NOT_TRACED void Fiber::enter() {
#if defined(__SANITIZE_ADDRESS__)
  // Returns the bounds of the stack switched from, the only way to learn those of the thread's own.
  __sanitizer_finish_switch_fiber(nullptr, &switching_from->low_, &switching_from->low_bytes_);
#endif
  switching_to->entry_();
  __builtin_unreachable();
}

}  // namespace turbomind::emulator
