// The thread pool: every piece once, errors of workers, and when workers sleep.
#include "core/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/isa.h"
#include "tests/check.h"

namespace turbomind {
namespace {

using std::chrono::microseconds;

void test_every_piece_once_and_errors() {
  ThreadPool pool(4);
  for (int i = 0; i < 2000; ++i) {
    std::atomic<int64_t> sum{0};
    pool.parallel_for(100, 3, [&](int64_t b, int64_t e, int) {
      for (int64_t j = b; j < e; ++j) sum += j;
    });
    CHECK(sum == 4950, "parallel_for misses or repeats a piece");
    if (i % 100 == 0) std::this_thread::sleep_for(microseconds(200));
    if (i % 7 != 0) continue;
    std::string what = "no error";
    try {
      pool.run([&](int w) {
        if (w == i % 4) throw Error(ErrorCode::model, "worker " + std::to_string(w));
      });
    } catch (const Error& e) {
      what = e.what();
    }
    CHECK(what == "worker " + std::to_string(i % 4), "got %s", what.c_str());
  }
}

void test_every_piece_of_ranges_once() {
  for (const int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 400; ++round) {
      const int64_t n = round < 350 ? round % 9 : round;  // the last pieces are contended
      std::vector<std::atomic<int>> seen(n);
      pool.parallel_ranges(n, [&](int64_t i, int64_t end, int) {
        CHECK(i < end && end <= n, "piece %d of a range up to %d of %d", int(i), int(end), int(n));
        ++seen[i];
        if (i == 0 && n > 300) std::this_thread::sleep_for(microseconds(100));  // others take over
      });
      for (int64_t i = 0; i < n; ++i) CHECK(seen[i] == 1, "piece %d: %d", int(i), seen[i].load());
    }
  }
}

// ---- sleeping ----

std::atomic<int> sleeps{0};
void count_sleep() {
  sleeps.fetch_add(1);
}
// Waits until `count` workers in all have begun to sleep.
bool sleeps_reach(int count) {
  for (int i = 0; i < 5000 && sleeps.load() < count; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return sleeps.load() == count;
}

void test_workers_release_their_tiles_before_they_sleep() {
  sleeps = 0;
  ThreadPool pool(3, count_sleep);
  CHECK(sleeps_reach(2), "%d of 2 workers sleep", sleeps.load());
  pool.run([](int) {});
  CHECK(sleeps_reach(4), "%d sleeps, expected 4", sleeps.load());
  CHECK(before_sleep(Isa::amx) == release_tiles);
  CHECK(before_sleep(Isa::avx512_bf16) == nullptr && before_sleep(Isa::amx_emulated) == nullptr);
}

void wait(microseconds time) {
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
}
// How often workers slept in 100 tries of a few calls, which start `gap` after the last one's end.
struct Sleeps {
  int fewest = 1 << 20, all = 0;  // of a try, of all
};
Sleeps sleeps_between_calls(ThreadPool& pool, bool open, microseconds gap) {
  Sleeps found;
  for (int i = 0; i < 100; ++i) {
    std::optional<ThreadPool::Step> step;
    if (open) step.emplace(pool);
    pool.run([](int) {});
    const int before = sleeps;
    for (int j = 0; j < 3; ++j) {
      wait(gap);
      pool.run([](int) {});
    }
    found.fewest = std::min(found.fewest, sleeps - before);
    found.all += sleeps - before;
  }
  return found;
}

// A busy machine may hold up a worker for longer than it spins, but not in every try; and a worker
// that does not spin sleeps in most of 300 gaps.
constexpr int kSome = 30;

void test_workers_spin_while_a_step_is_open() {
  if (std::thread::hardware_concurrency() < 2) return;
  ThreadPool pool(2, count_sleep);
  const microseconds gap(100);
  CHECK(sleeps_between_calls(pool, true, gap).fewest == 0, "a worker slept in every step");
  CHECK(sleeps_between_calls(pool, false, gap).all > kSome, "a worker spins between steps");
  const int before = sleeps;
  {
    const ThreadPool::Step step(pool);
  }
  CHECK(sleeps > before, "the caller keeps its tiles");
}

void test_workers_do_not_spin_where_cpus_are_short() {
  const int cpus = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const microseconds gap(10);
  ThreadPool large(cpus + 1, count_sleep);
  CHECK(sleeps_between_calls(large, true, gap).all > kSome, "%d threads spin", cpus + 1);
  if (cpus < 2) return;
  ThreadPool one(cpus), other(cpus, count_sleep);
  const ThreadPool::Step step(one);
  CHECK(sleeps_between_calls(other, true, gap).all > kSome, "two pools spin at once");
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(
      argc, argv,
      {TM_CASE(test_every_piece_once_and_errors), TM_CASE(test_every_piece_of_ranges_once),
       TM_CASE(test_workers_release_their_tiles_before_they_sleep),
       TM_CASE(test_workers_spin_while_a_step_is_open),
       TM_CASE(test_workers_do_not_spin_where_cpus_are_short)});
}
