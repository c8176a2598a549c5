// The engine's worker threads. The calling thread is worker 0; the pool has size() - 1 more. One
// thread at a time may call; the pool has no queue of tasks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace turbomind {

// One turn of a loop that waits for another thread.
inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Decides how long a thread spins for the next call before it sleeps.
struct SpinRule {
  int cpus = 1;              // that this process may use
  int threads = 1;           // of the pool
  int threads_in_steps = 0;  // of all pools of the process with an open step
  bool in_step = false;      // of this pool

  // Returns whether a thread that has waited this long spins on. It never does where more threads
  // compute than there are CPUs: it would hold up one of them.
  bool spins(std::chrono::nanoseconds waited) const;
};

class ThreadPool {
 public:
  // threads >= 1. Workers spin a few microseconds for the next call, then sleep; before they do,
  // each calls `before_sleep`. They never spin where more threads compute than there are CPUs.
  explicit ThreadPool(int threads, void (*before_sleep)() = nullptr);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // While one lives, workers spin up to a millisecond for the next call, which follows within the
  // same step of the engine. Its end calls `before_sleep` for the calling thread. One at a time.
  class Step {
   public:
    explicit Step(ThreadPool& pool);
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    ThreadPool& pool_;
  };

  int size() const { return static_cast<int>(workers_.size()) + 1; }
  // The rule that waiting threads follow now.
  SpinRule spin_rule() const;

  // Calls fn(worker) once on every worker, 0 <= worker < size(), and returns when all are done.
  // The first exception thrown by any worker is rethrown here. Not reentrant.
  template <typename F>
  void run(F&& fn) {
    run_impl([](void* f, int w) { (*static_cast<std::remove_reference_t<F>*>(f))(w); }, &fn);
  }

  // Calls fn(begin, end, worker) over [0, n) in pieces of `grain`, and each free worker
  // takes the next. The result of a piece must not depend on the worker.
  template <typename F>
  void parallel_for(int64_t n, int64_t grain, F&& fn) {
    if (n <= 0) return;
    if (grain < 1) grain = 1;
    if (size() == 1 || n <= grain) {
      fn(int64_t{0}, n, 0);
      return;
    }
    std::atomic<int64_t> next{0};
    run([&](int w) {
      for (;;) {
        const int64_t b = next.fetch_add(grain, std::memory_order_relaxed);
        if (b >= n) break;
        fn(b, b + grain < n ? b + grain : n, w);
      }
    });
  }

  // Calls fn(piece, range_end, worker) for each piece of [0, n). Every worker has a contiguous
  // range of pieces, which it takes in their order, so that memory lies and is prefetched in one
  // row; a worker whose range is done takes pieces of a few others'. The result of a piece must not
  // depend on the worker.
  template <typename F>
  void parallel_ranges(int64_t n, F&& fn) {
    const int64_t workers = size();
    if (workers == 1 || n <= 1) {
      for (int64_t i = 0; i < n; ++i) fn(i, n, 0);
      return;
    }
    begin_ranges(n);
    run([&](int w) {
      // Ranges 1, 2, 4... further on: at many workers a look at each would take longer than it
      // saves.
      for (int64_t hop = 0; hop < workers; hop = hop == 0 ? 1 : hop * 2) {
        Range& range = ranges_[(w + hop) % workers];
        while (range.next.load(std::memory_order_relaxed) < range.end) {
          const int64_t i = range.next.fetch_add(1, std::memory_order_relaxed);
          if (i < range.end) fn(i, range.end, w);
        }
      }
    });
  }

 private:
  struct alignas(64) Range {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  using Call = void (*)(void*, int);
  void begin_ranges(int64_t n);
  void run_impl(Call call, void* arg);
  void worker_loop(int worker);

  std::vector<std::thread> workers_;
  std::vector<Range> ranges_;  // one per worker
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace turbomind
