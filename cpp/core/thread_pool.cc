#include "core/thread_pool.h"

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "core/error.h"

namespace turbomind {

namespace {

// Ops of a step are a few microseconds apart, and a futex wake takes longer.
constexpr auto kSpin = std::chrono::microseconds(20);

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Done>
bool spin_until(Done done) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
      cpu_pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

}  // namespace

// A sleeper counts itself (seq_cst) before its last check of the condition, and a waker changes the
// condition before it reads the count. So either the sleeper sees the change or the waker sees the
// sleeper.
struct ThreadPool::State {
  Call call = nullptr;
  void* arg = nullptr;
  void (*before_sleep)() = nullptr;
  alignas(64) std::atomic<uint64_t> generation{0};
  alignas(64) std::atomic<int> remaining{0};
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable start_cv, done_cv;
  std::exception_ptr error;  // the first one; guarded by mutex

  void record_error() {
    std::lock_guard lock(mutex);
    if (!error) error = std::current_exception();
  }
  void begin_generation() {
    generation.fetch_add(1);
    if (sleepers.load() > 0) {
      std::lock_guard lock(mutex);
      start_cv.notify_all();
    }
  }
  void wait_for_workers() {
    const auto done = [&] { return remaining.load() == 0; };
    if (spin_until(done)) return;
    std::unique_lock lock(mutex);
    caller_sleeps.store(true);
    done_cv.wait(lock, done);
    caller_sleeps.store(false);
  }
};

ThreadPool::ThreadPool(int threads, void (*before_sleep)()) : state_(std::make_unique<State>()) {
  if (threads < 1) {
    throw_error(ErrorCode::invalid_request, "threads must be at least 1, got ", threads);
  }
  state_->before_sleep = before_sleep;
  workers_.reserve(threads - 1);
  try {
    for (int w = 1; w < threads; ++w) workers_.emplace_back([this, w] { worker_loop(w); });
  } catch (...) {
    state_->stop.store(true);
    state_->begin_generation();
    for (auto& t : workers_) t.join();
    throw_error(ErrorCode::internal, "the system refused to start ", threads - 1,
                " worker threads");
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true);
  state_->begin_generation();
  for (auto& t : workers_) t.join();
}

void ThreadPool::run_impl(Call call, void* arg) {
  if (workers_.empty()) {
    call(arg, 0);
    return;
  }
  State& s = *state_;
  s.call = call;
  s.arg = arg;
  s.remaining.store(static_cast<int>(workers_.size()));
  s.begin_generation();
  try {
    call(arg, 0);
  } catch (...) {
    s.record_error();
  }
  s.wait_for_workers();
  std::exception_ptr error;
  {
    std::lock_guard lock(s.mutex);
    std::swap(error, s.error);
  }
  if (error) std::rethrow_exception(error);
}

void ThreadPool::worker_loop(int worker) {
  State& s = *state_;
  uint64_t seen = 0;
  for (;;) {
    const auto started = [&] { return s.generation.load() != seen; };
    if (!spin_until(started)) {
      if (s.before_sleep != nullptr) s.before_sleep();
      std::unique_lock lock(s.mutex);
      s.sleepers.fetch_add(1);
      s.start_cv.wait(lock, started);
      s.sleepers.fetch_sub(1);
    }
    seen = s.generation.load();
    if (s.stop.load()) return;
    try {
      s.call(s.arg, worker);
    } catch (...) {
      s.record_error();
    }
    if (s.remaining.fetch_sub(1) == 1 && s.caller_sleeps.load()) {
      std::lock_guard lock(s.mutex);
      s.done_cv.notify_one();
    }
  }
}

}  // namespace turbomind
