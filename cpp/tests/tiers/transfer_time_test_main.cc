// Predictions of loading against media with known costs, of computing against its formula, the
// choice between both, records of speeds, and the probe of a folder, which leaves no file.
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "cost/transfer_time.h"
#include "tests/check.h"
#include "tiers/fetch/fetch_cost.h"
#include "tiers/speed_records.h"

namespace turbomind {
namespace {

constexpr int64_t kMiB = 1 << 20;

bool near(double a, double b, double tolerance) {
  return std::fabs(a - b) <= tolerance * std::fabs(b);
}

struct Medium {
  double fixed, bytes_per_second;
  double seconds(int64_t bytes) const {
    return fixed + static_cast<double>(bytes) / bytes_per_second;
  }
};

void test_first_speed() {
  const TransferTime time({2e9, 1e-3});
  CHECK(near(time.predict(2'000'000'000), 1.001, 1e-9) && near(time.predict(2000), 0.001001, 1e-9));
  CHECK(time.predict(0) == 0 && time.predict(-5) == 0 && time.observed() == 0);
}

// The fit reaches the medium's speed from a first speed far off to either side.
void test_learns() {
  for (double factor : {0.05, 0.3, 1.0, 4.0, 30.0}) {
    const Medium medium{2e-3, 1.5e9};
    TransferTime time({medium.bytes_per_second * factor, medium.fixed * factor});
    for (int i = 0; i < 8; ++i)
      for (int64_t bytes : {kMiB, 96 * kMiB}) time.observe(bytes, medium.seconds(bytes));
    for (int64_t bytes : {kMiB, 10 * kMiB, 96 * kMiB, 500 * kMiB})
      CHECK(near(time.predict(bytes), medium.seconds(bytes), 0.2));
    CHECK(time.observed() == 16);
  }
}

// Loads of a single size are predicted as observed.
void test_one_size() {
  for (double factor : {0.2, 1.0, 5.0}) {
    TransferTime time({1e9, 1e-4});
    for (int i = 0; i < 8; ++i) time.observe(100 * kMiB, factor * 0.105);
    CHECK(near(time.predict(100 * kMiB), factor * 0.105, 0.1));
  }
}

// The fit follows a medium that becomes slower or faster within a few loads.
void test_change() {
  for (double factor : {0.125, 8.0}) {
    TransferTime time({1e9, 1e-4});
    const Medium before{1e-4, 1e9}, after{1e-4 * factor, 1e9 / factor};
    for (int i = 0; i < 20; ++i) time.observe(50 * kMiB, before.seconds(50 * kMiB));
    for (int i = 0; i < 6; ++i) time.observe(50 * kMiB, after.seconds(50 * kMiB));
    CHECK(near(time.predict(50 * kMiB), after.seconds(50 * kMiB), 0.3));
  }
}

void test_noise() {
  std::mt19937 random(1);
  std::lognormal_distribution<double> noise(0, 0.2);
  const Medium medium{1e-3, 2e9};
  TransferTime time({0.5e9, 1e-5});
  int good = 0;
  for (int i = 0; i < 220; ++i) {
    const int64_t bytes = (1 + random() % 200) * kMiB;
    if (i >= 20) good += near(time.predict(bytes), medium.seconds(bytes), 0.15);
    time.observe(bytes, medium.seconds(bytes) * noise(random));
  }
  CHECK(good >= 170);
}

void test_outliers() {
  const Medium medium{1e-3, 1e9};
  TransferTime time({1e9, 1e-3});
  const int64_t bytes = 20 * kMiB;
  for (int i = 0; i < 10; ++i) time.observe(bytes, medium.seconds(bytes));
  time.observe(bytes, 1000.0);
  CHECK(time.predict(bytes) < 2.5 * medium.seconds(bytes));
  for (int i = 0; i < 8; ++i) time.observe(bytes, medium.seconds(bytes));
  CHECK(near(time.predict(bytes), medium.seconds(bytes), 0.15));
  for (double nonsense : {0.0, -1.0, std::nan(""), HUGE_VAL}) time.observe(bytes, nonsense);
  time.observe(0, 1.0);
  time.observe(-3, 1.0);
  CHECK(time.observed() == 19);
}

void test_many_small_loads() {
  const Medium medium{5e-4, 1e9};
  TransferTime time({5e9, 0});
  for (int i = 0; i < 8; ++i) time.observe(200 * kMiB, medium.seconds(200 * kMiB));
  for (int i = 0; i < 1000; ++i) time.observe(100'000, medium.seconds(100'000));
  CHECK(near(time.predict(200 * kMiB), medium.seconds(200 * kMiB), 0.1));
  CHECK(near(time.predict(100'000), medium.seconds(100'000), 0.1));
}

// Contradictory loads lead to no negative cost.
void test_nonnegative() {
  for (const auto& [small, large] : {std::pair{0.5, 0.01}, std::pair{1e-4, 0.5}}) {
    TransferTime time({1e9, 1e-4});
    for (int i = 0; i < 20; ++i) {
      time.observe(kMiB, small);
      time.observe(64 * kMiB, large);
      CHECK(time.speed().seconds_per_read >= 0 && time.speed().bytes_per_second > 0);
      for (int64_t bytes = 1; bytes < int64_t{1} << 40; bytes *= 8) {
        CHECK(time.predict(bytes) > 0 && std::isfinite(time.predict(bytes)));
        CHECK(time.predict(8 * bytes) >= time.predict(bytes));
      }
    }
  }
}

void test_compute() {
  StepTime steps;
  CHECK(near(compute_seconds(steps, 300, 1000, 128, 150.0), 2.0, 1e-9));
  CHECK(compute_seconds(steps, 0, 1000, 128, 150.0) == 0);
  const auto ms = [](double tokens, double past) {
    return 3 + 0.2 * tokens + 4e-5 * (tokens * past + tokens * (tokens + 1) / 2);
  };
  std::mt19937 random(2);
  for (int i = 0; i < 300; ++i) {
    const int64_t tokens = 1 + random() % 512, past = random() % 8000;
    StepCost cost;
    cost.add(tokens, past);
    steps.observe(cost, ms(double(tokens), double(past)));
  }
  const double want = ms(512, 1000) + ms(512, 1512) + ms(176, 2024);
  CHECK(near(compute_seconds(steps, 1200, 1000, 512, 1.0), want / 1000, 0.02));
  CHECK(near(compute_seconds(steps, 5, 7000, 512, 1.0), ms(5, 7000) / 1000, 0.02));
  CHECK(compute_seconds(steps, 0, 7000, 512, 1.0) == 0);
  CHECK(compute_seconds(steps, 3, 0, 0, 1.0) > 0);
}

// Two loads share the medium, and unpacking is never free.
void test_load_speed() {
  const ReadSpeed medium{1e9, 1e-4}, alone = load_speed(medium, 1), shared = load_speed(medium, 2);
  CHECK(alone.bytes_per_second < 1e9 && alone.seconds_per_read == 1e-4);
  CHECK(near(1 / shared.bytes_per_second - 1 / alone.bytes_per_second, 1e-9, 1e-6));
}

// A medium of 100 MB/s loads a page of 1 MB in 10 ms, and two pages at a time.
void test_choice() {
  const FetchCost cost({{1e8, 0}});
  const auto loads = [](int64_t pages) {
    return std::vector<TierLoad>{{pages, pages * 1'000'000}};
  };
  CHECK(near(cost.load_seconds(loads(40)), 0.2, 1e-9));
  CHECK(cost.worth(loads(1), 0) && cost.worth(loads(8), 0));  // 40 ms are below the noticeable
  CHECK(cost.worth(loads(40), 0.2) && cost.worth(loads(40), 0.15));
  CHECK(cost.worth(loads(40), 0.11));  // later, but not twice as late
  CHECK(!cost.worth(loads(40), 0.09) && !cost.worth(loads(40), 0));
  CHECK(!cost.worth(loads(4000), 9) && cost.worth(loads(4000), 11));
}

double ms_of(double tokens, double past) {
  return 3 + 0.2 * tokens + 4e-5 * (tokens * past + tokens * (tokens + 1) / 2);
}

StepCost cost_of(int64_t tokens, int64_t past) {
  StepCost cost;
  cost.add(tokens, past);
  return cost;
}

StepTime::Fit known_fit() {
  StepTime steps;
  for (int i = 0; i < 40; ++i)
    for (const int64_t tokens : {1, 64, 512})
      steps.observe(cost_of(tokens, 199 * i), ms_of(double(tokens), 199.0 * i));
  CHECK(steps.fit());
  return *steps.fit();
}

// A recorded fit is where the next process begins, and real steps soon outweigh it.
// Chunks grow to twice the largest observed step, or at once to what is trusted.
void test_trust() {
  StepTime steps;
  steps.observe(cost_of(1, 0), 3);
  steps.observe(cost_of(64, 0), ms_of(64, 0));
  CHECK(steps.largest_chunk({}, 0, 512, 1e6) == 128);
  steps.trust(512);
  CHECK(steps.largest_chunk({}, 0, 4096, 1e6) == 512);
  CHECK(steps.largest_chunk({}, 0, 512, 30) < 150);  // the time limits it all the same
}

void test_begin_with() {
  StepTime steps;
  CHECK(!steps.fit());
  CHECK(steps.begin_with(known_fit()));
  for (const int64_t tokens : {1, 20, 64, 512})
    for (const int64_t past : {0, 500, 8192})
      CHECK(near(steps.predict(cost_of(tokens, past)), ms_of(double(tokens), double(past)), 0.02));
  CHECK(steps.fit() && steps.fit()->most_tokens == 512);
  for (int i = 0; i < 25; ++i)
    for (const int64_t tokens : {1, 4, 16, 64, 256, 512})
      steps.observe(cost_of(tokens, 2000), 2 * ms_of(double(tokens), 2000));
  CHECK(near(steps.predict(cost_of(64, 2000)), 2 * ms_of(64, 2000), 0.15));
}

void test_no_fit() {
  const StepTime::Fit good = known_fit();
  for (const double nonsense : {-1.0, std::nan(""), HUGE_VAL}) {
    StepTime::Fit bad = good;
    bad.ms[1] = nonsense;
    StepTime steps;
    CHECK(!steps.begin_with(bad) && !steps.fit() && steps.predict(cost_of(64, 0)) == 0);
  }
  StepTime steps;
  CHECK(!steps.begin_with({good.ms, 0}) && !steps.begin_with({{0, 0, 0}, 64}) && !steps.fit());
}

std::string make_folder() {
  std::string folder = (std::filesystem::temp_directory_path() / "speeds-XXXXXX").string();
  CHECK(mkdtemp(folder.data()) != nullptr);
  return folder;
}

void test_records() {
  const std::string folder = make_folder();
  const SpeedRecord one{known_fit(), {1.5e9, 2e-5}}, other{{{1, 2, 3}, 64}, {3e8, 0}};
  const SpeedRecords records(folder, 7);
  CHECK(!records.read() && !SpeedRecords().read());
  SpeedRecords().write(one);
  records.write(other);
  records.write(one);
  CHECK(records.read() == one && !SpeedRecords(folder, 8).read());
  for (uint64_t key = 100; key < 100 + SpeedRecords::kMost - 1; ++key)
    SpeedRecords(folder, key).write(other);
  CHECK(records.read() == one && SpeedRecords(folder, 100).read() == other);
  SpeedRecords(folder, 99).write(other);  // one more than kMost: the oldest is dropped
  CHECK(!records.read() && SpeedRecords(folder, 99).read() == other);
  const auto begin = std::filesystem::directory_iterator(folder);
  CHECK(std::distance(begin, std::filesystem::directory_iterator()) == 1);
  CHECK(std::filesystem::file_size(folder + "/speeds") == SpeedRecords::kMost * 64);
  records.write({one.steps, {std::nan(""), 0}});
  CHECK(!records.read());
  std::filesystem::remove_all(folder);
  records.write(one);  // nowhere
  CHECK(!records.read());
}

// A record with a changed byte or a torn end is ignored; the others are read.
void test_damaged_records() {
  const std::string folder = make_folder(), path = folder + "/speeds";
  const SpeedRecord one{known_fit(), {1.5e9, 2e-5}}, other{{{1, 2, 3}, 64}, {3e8, 0}};
  const SpeedRecords first(folder, 1), second(folder, 2);
  first.write(one);
  second.write(other);  // written before the first
  std::ifstream in(path, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  const auto put = [&](const std::string& data) { std::ofstream(path, std::ios::binary) << data; };
  for (size_t i = 64; i < whole.size(); ++i) {
    std::string changed = whole;
    changed[i] ^= 1 << i % 8;
    put(changed);
    CHECK(!first.read() && second.read() == other);
  }
  for (size_t size = 64; size < whole.size(); ++size) {
    put(whole.substr(0, size));
    CHECK(!first.read() && second.read() == other);
  }
  first.write(one);
  CHECK(first.read() == one && second.read() == other);
  std::filesystem::remove_all(folder);
}

void test_probe() {
  std::string folder = make_folder();
  const auto speed = probe_read_speed(folder);
  CHECK(speed && speed->bytes_per_second > 0 && std::isfinite(speed->bytes_per_second));
  CHECK(speed->seconds_per_read >= 0 && speed->seconds_per_read < 10);
  CHECK(std::filesystem::is_empty(folder));
  CHECK(!probe_read_speed(folder + "/missing"));
  if (geteuid() != 0) {  // root ignores modes
    CHECK(chmod(folder.c_str(), 0500) == 0);
    CHECK(!probe_read_speed(folder));
  }
  std::filesystem::remove(folder);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(turbomind::test_first_speed),
                                  TM_CASE(turbomind::test_learns),
                                  TM_CASE(turbomind::test_one_size),
                                  TM_CASE(turbomind::test_change),
                                  TM_CASE(turbomind::test_noise),
                                  TM_CASE(turbomind::test_outliers),
                                  TM_CASE(turbomind::test_many_small_loads),
                                  TM_CASE(turbomind::test_nonnegative),
                                  TM_CASE(turbomind::test_compute),
                                  TM_CASE(turbomind::test_load_speed),
                                  TM_CASE(turbomind::test_choice),
                                  TM_CASE(turbomind::test_begin_with),
                                  TM_CASE(turbomind::test_trust),
                                  TM_CASE(turbomind::test_no_fit),
                                  TM_CASE(turbomind::test_records),
                                  TM_CASE(turbomind::test_damaged_records),
                                  TM_CASE(turbomind::test_probe),
                              });
}
