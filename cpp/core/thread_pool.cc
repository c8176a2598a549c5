#include "core/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__linux__)
#include <sched.h>
#endif

#include "core/error.h"
#include "core/process.h"

namespace turbomind {

namespace {

using Clock = std::chrono::steady_clock;

// Calls are a few microseconds apart, and a futex wake takes longer.
constexpr std::chrono::nanoseconds kSpin = std::chrono::microseconds(20);
// In an open step a worker that ends its share early waits for the slowest one.
constexpr std::chrono::nanoseconds kStepSpin = std::chrono::milliseconds(1);

// Returns the CPUs of this process: its affinity mask, at most its quota of CPU time.
int usable_cpus() {
  int cpus = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = CPU_COUNT(&set);
#endif
  return static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>(cpus, cpu_quota().value_or(cpus))));
}

// Threads of the pools of this process that have an open step.
std::atomic<int> threads_in_steps{0};

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
  int threads = 1;
  const int cpus = usable_cpus();
  alignas(64) std::atomic<bool> in_step{false};

  SpinRule rule() const {
    return {cpus, threads, threads_in_steps.load(std::memory_order_relaxed),
            in_step.load(std::memory_order_relaxed)};
  }
  template <typename Done>
  bool spin_until(Done done) const {
    if (done()) return true;
    const auto start = Clock::now();
    for (auto waited = start - start; rule().spins(waited); waited = Clock::now() - start) {
      for (int i = 0; i < 16; ++i) {
        if (done()) return true;
        cpu_pause();
      }
      if (waited >= kSpin) std::this_thread::yield();  // another process may want this CPU
    }
    return done();
  }

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

bool SpinRule::spins(std::chrono::nanoseconds waited) const {
  if (threads > cpus || threads_in_steps > cpus) return false;
  return waited < (in_step ? kStepSpin : kSpin);
}

SpinRule ThreadPool::spin_rule() const {
  return state_->rule();
}

ThreadPool::ThreadPool(int threads, void (*before_sleep)()) : state_(std::make_unique<State>()) {
  if (threads < 1) {
    throw_error(ErrorCode::invalid_request, "threads must be at least 1, got ", threads);
  }
  state_->before_sleep = before_sleep;
  state_->threads = threads;
  ranges_ = std::vector<Range>(threads);
  workers_.reserve(threads - 1);
  try {
    for (int w = 1; w < threads; ++w) {
      workers_.push_back(start_thread([this, w] { worker_loop(w); }));
    }
  } catch (...) {
    state_->stop.store(true);
    state_->begin_generation();
    for (auto& t : workers_) t.join();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true);
  state_->begin_generation();
  for (auto& t : workers_) t.join();
}

ThreadPool::Step::Step(ThreadPool& pool) : pool_(pool) {
  threads_in_steps.fetch_add(pool_.size(), std::memory_order_relaxed);
  pool_.state_->in_step.store(true, std::memory_order_relaxed);
}

ThreadPool::Step::~Step() {
  pool_.state_->in_step.store(false, std::memory_order_relaxed);
  threads_in_steps.fetch_sub(pool_.size(), std::memory_order_relaxed);
  if (pool_.state_->before_sleep != nullptr) pool_.state_->before_sleep();
}

void ThreadPool::begin_ranges(int64_t n) {
  const int64_t workers = size();
  for (int64_t w = 0; w < workers; ++w) {
    ranges_[w].next.store(n * w / workers, std::memory_order_relaxed);
    ranges_[w].end = n * (w + 1) / workers;
  }
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
    if (!s.spin_until(started)) {
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
