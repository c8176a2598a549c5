// The engine's worker threads. The calling thread is worker 0; the pool has size() - 1 more. One
// thread at a time may call; the pool has no queue of tasks.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace turbomind {

class ThreadPool {
 public:
  // threads >= 1. Workers spin a few microseconds for the next call, then sleep; before they do,
  // each calls `before_sleep`.
  explicit ThreadPool(int threads, void (*before_sleep)() = nullptr);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

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

 private:
  using Call = void (*)(void*, int);
  void run_impl(Call call, void* arg);
  void worker_loop(int worker);

  std::vector<std::thread> workers_;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace turbomind
