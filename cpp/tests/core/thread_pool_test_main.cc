// The thread pool: every piece once, errors of workers, and when workers sleep.
#include "core/thread_pool.h"

#include <chrono>
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
void wait_for_sleeps(int count) {
  while (sleeps.load() < count) std::this_thread::yield();
}

void test_workers_release_their_tiles_before_they_sleep() {
  sleeps = 0;
  ThreadPool pool(3, count_sleep);
  wait_for_sleeps(2);  // a worker that spins for ever fails the test by its time limit
  pool.run([](int) {});
  wait_for_sleeps(4);
  CHECK(sleeps == 4, "%d sleeps, expected 4", sleeps.load());
  ThreadPool alone(1, count_sleep);
  {
    const ThreadPool::Step step(alone);
  }
  CHECK(sleeps == 5, "the caller keeps its tiles after a step");
  CHECK(before_sleep(Isa::amx) == release_tiles);
  CHECK(before_sleep(Isa::avx512_bf16) == nullptr && before_sleep(Isa::amx_emulated) == nullptr);
}

void test_threads_spin_longer_in_an_open_step() {
  const microseconds short_wait(19), long_wait(999);
  SpinRule rule{.cpus = 2, .threads = 2, .threads_in_steps = 0, .in_step = false};
  CHECK(rule.spins(short_wait) && !rule.spins(microseconds(20)) && !rule.spins(long_wait));
  rule.in_step = true;
  rule.threads_in_steps = 2;
  CHECK(rule.spins(short_wait) && rule.spins(long_wait) && !rule.spins(microseconds(1000)));
}

void test_threads_do_not_spin_where_cpus_are_short() {
  SpinRule rule{.cpus = 2, .threads = 3, .threads_in_steps = 3, .in_step = true};
  CHECK(!rule.spins(microseconds(0)), "3 threads spin on 2 CPUs");
  rule.threads = 2;  // of 4 in two pools
  rule.threads_in_steps = 4;
  CHECK(!rule.spins(microseconds(0)), "two pools of 2 threads spin on 2 CPUs");
  rule.in_step = false;  // of the second pool, while the first one computes
  rule.threads_in_steps = 2;
  CHECK(rule.spins(microseconds(0)));
}

void test_a_pool_follows_the_open_steps() {
  ThreadPool one(2), other(3);
  CHECK(one.spin_rule().cpus >= 1 && one.spin_rule().threads == 2);
  CHECK(!one.spin_rule().in_step && one.spin_rule().threads_in_steps == 0);
  {
    const ThreadPool::Step first(one);
    CHECK(one.spin_rule().in_step && !other.spin_rule().in_step);
    const ThreadPool::Step second(other);
    CHECK(other.spin_rule().in_step && one.spin_rule().threads_in_steps == 5);
  }
  CHECK(!one.spin_rule().in_step && other.spin_rule().threads_in_steps == 0);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(
      argc, argv,
      {TM_CASE(test_every_piece_once_and_errors), TM_CASE(test_every_piece_of_ranges_once),
       TM_CASE(test_workers_release_their_tiles_before_they_sleep),
       TM_CASE(test_threads_spin_longer_in_an_open_step),
       TM_CASE(test_threads_do_not_spin_where_cpus_are_short),
       TM_CASE(test_a_pool_follows_the_open_steps)});
}
