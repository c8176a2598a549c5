// The thread pool: every piece once, errors of workers, and when workers sleep.
#include "core/thread_pool.h"

#include <chrono>
#include <string>

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

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv,
                   {TM_CASE(test_every_piece_once_and_errors),
                    TM_CASE(test_workers_release_their_tiles_before_they_sleep)});
}
