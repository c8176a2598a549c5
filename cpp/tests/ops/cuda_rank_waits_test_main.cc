// Kernels that wait for each other (cpp/cuda/device_wait.h) on one GPU, which with "--gpu" is a
// real one: ranks with a stream each add their parts, in the GPU's memory and in the host's,
// launched and replayed, bit for bit as a loop in their order. Then what ends a wait: its limit,
// and the host.
//
// In emulation the driver also shows that it can fail: each fault of a rank gives other bits. On a
// GPU that would depend on time.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/emulated_gpu.h"
#include "cuda/emulator.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"
#include "tests/ops/gpu_ranks.h"

namespace turbomind {
namespace {

constexpr int kExchanges = 16;  // of a step: an even number, so that steps continue with a buffer
constexpr int kSources = 4;     // different parts of a rank
constexpr uint32_t kCounts = 4096;  // of a step

enum class Fault {
  none,
  no_wait,      // in one exchange of a step
  one_buffer,   // for the parts of all exchanges
  stale_count,  // each step begins at the count of the first one
  unordered,    // each rank begins with its own part
};

struct Case {
  int ranks, rows, cols;
  Place place;
  bool graphs;
  Fault fault = Fault::none;
  int steps() const { return real ? 60 : 2; }
  size_t elements() const { return static_cast<size_t>(rows) * cols; }
  std::string name() const {
    return std::to_string(ranks) + " ranks, [" + std::to_string(rows) + ", " +
           std::to_string(cols) + "], " + place_name(place) + (graphs ? ", graphs" : "");
  }
};

// Of a rank: what it adds, and where.
struct RankArrays {
  RankArrays(Gpu& gpu, const Case& c, int rank)
      : values(kSources * c.elements()),
        sources(gpu, values.size()),
        x(gpu, std::vector<float>(c.elements(), 0)),
        bases(gpu, c.steps() * sizeof(uint32_t)) {
    std::mt19937 random(7 + rank + test_seed);
    std::normal_distribution<float> normal(0, 1);
    for (float& value : values) value = normal(random);
    sources.set(values);
    for (int s = 0; s < c.steps(); ++s)
      bases.as<uint32_t>()[s] = c.fault == Fault::stale_count ? 0 : s * kCounts;
  }
  std::vector<float> values;
  GpuArray<float> sources, x;
  PinnedBuffer bases;
  GpuGraph step;
};

class Steps {
 public:
  Steps(TestRanks& ranks, const Case& c) : ranks_(ranks), case_(c) {
    ranks_.set_counters(0);
    for (int r = 0; r < c.ranks; ++r) arrays_.emplace_back(ranks_[r].gpu, c, r);
    load_kernels();
    if (!c.graphs) return;
    for (int r = 0; r < c.ranks; ++r)
      arrays_[r].step = GpuGraph(ranks_[r].stream, [&] { submit_step(r); });
  }

  // The ranks' steps, one after another: no stream's queue is ever full of work that waits.
  void run() {
    for (int s = 0; s < case_.steps(); ++s)
      for (int r = 0; r < case_.ranks; ++r) {
        ranks_[r].copy(ranks_[r].base.data(), arrays_[r].bases.as<uint32_t>() + s, 4);
        if (case_.graphs)
          arrays_[r].step.launch(ranks_[r].stream);
        else
          submit_step(r);
      }
    ranks_.synchronize();
  }

  bool right() const {
    const size_t elements = case_.elements();
    std::vector<float> want(elements, 0);
    for (int n = 1; n <= case_.steps() * kExchanges; ++n)
      for (size_t i = 0; i < elements; ++i) {
        const size_t at = (n - 1) % kExchanges % kSources * elements + i;
        float sum = arrays_[0].values[at];
        for (int r = 1; r < case_.ranks; ++r) sum += arrays_[r].values[at];
        want[i] += sum;
      }
    for (const RankArrays& rank : arrays_)
      if (std::memcmp(rank.x.get().data(), want.data(), elements * sizeof(float)) != 0)
        return false;
    return true;
  }

 private:
  DeviceRankSum sum_of(int r, uint32_t number) {
    DeviceRankSum s;
    s.exchange = ranks_.exchange(r, number);
    const int first = case_.fault == Fault::unordered ? r : 0;
    for (int i = 0; i < case_.ranks; ++i)
      s.parts[i] = ranks_[(first + i) % case_.ranks].parts[buffer(number)];
    s.part_stride = s.x_stride = case_.cols;
    s.x = arrays_[r].x.data();
    s.rows = case_.rows, s.cols = case_.cols;
    s.add = true;
    return s;
  }
  int buffer(uint32_t number) const { return case_.fault == Fault::one_buffer ? 0 : number % 2; }

  // A first launch may wait for the whole GPU, so it comes before any kernel waits.
  void load_kernels() {
    for (int r = 0; r < case_.ranks; ++r) {
      DeviceRankSum s = sum_of(r, 1);
      s.exchange.waits = false;
      ranks_.sum(r, s);
      ranks_.synchronize();
      arrays_[r].x.set(std::vector<float>(case_.elements(), 0));
    }
  }

  void submit_step(int r) {
    for (uint32_t n = 1; n <= kExchanges; ++n) {
      ranks_[r].copy(ranks_[r].parts[buffer(n)],
                     arrays_[r].sources.data() + (n - 1) % kSources * case_.elements(),
                     case_.elements() * sizeof(float));
      DeviceRankSum s = sum_of(r, n);
      if (case_.fault == Fault::no_wait && n == 5) s.exchange.waits = false;
      ranks_.sum(r, s);
    }
  }

  TestRanks& ranks_;
  const Case case_;
  std::vector<RankArrays> arrays_;
};

// Returns whether all ranks have the right sums, in time.
bool run_steps(const Case& c, uint64_t seed) {
  emulator::set_schedule_seed(seed + test_seed);
  TestRanks ranks(c.ranks, c.place, c.elements());
  Steps steps(ranks, c);
  const auto begin = std::chrono::steady_clock::now();
  steps.run();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  if (real)
    std::printf("%s: %.2f us an exchange\n", c.name().c_str(),
                took.count() / (c.steps() * kExchanges));
  return ranks.stop() == 0 && steps.right();
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const int cols = real ? 4096 : 40;
  for (const Place place : {Place::streams, Place::pinned_streams})
    for (const bool graphs : {false, true}) {
      all.push_back({2, 1, cols, place, graphs});
      all.push_back({3, 16, cols, place, graphs});
    }
  all.push_back({2, 70, cols, Place::streams, false});  // more blocks than may wait
  return all;
}

void test_sums() {
  for (const Case& c : cases())
    for (uint64_t seed = 0; seed < (real ? 1 : 2); ++seed)
      CHECK(run_steps(c, seed), "%s, seed %d", c.name().c_str(), int(seed));
}

void test_faults_are_found() {
  if (real) return;
  for (const bool graphs : {false, true})
    for (const Fault fault :
         {Fault::no_wait, Fault::one_buffer, Fault::stale_count, Fault::unordered}) {
      int found = 0;
      for (uint64_t seed = 0; seed < 6; ++seed)
        found += !run_steps({3, 2, 40, Place::streams, graphs, fault}, seed);
      CHECK(found >= (fault == Fault::unordered ? 6 : 3), "fault %d: found with %d seeds of 6",
            static_cast<int>(fault), found);
    }
}

// A rank waits alone, once with its limit and once until the host ends the wait; then all come.
void check_ends(Place place) {
  TestRanks ranks(2, place, 64);
  const auto meet = [&](int r, uint32_t number, uint64_t limit) {
    DeviceExchange e = ranks.exchange(r, number);
    e.limit_ns = limit;
    ranks.meet(r, e);
  };
  meet(0, 0, 1);  // loads the kernel; both are at this count
  ranks.synchronize();
  emulator::set_wait_limit(0);
  meet(1, 1, 50'000'000);
  ranks.synchronize();
  CHECK(ranks.stop() == 1 && ranks.missing(1) == 1 && ranks.missing(0) == 0);
  emulator::set_wait_limit(10);
  ranks.stop() = ranks.missing(1) = 0;
  meet(1, 2, 10'000'000'000);
  ranks.stop() = 1;
  ranks.synchronize();
  CHECK(ranks.missing(0) == 0 && ranks.missing(1) == 0);
  ranks.stop() = 0;
  for (uint32_t number = 3; number < 6; ++number)
    for (const int r : {0, 1}) meet(r, number, 2'000'000'000);
  ranks.synchronize();
  CHECK(ranks.stop() == 0);
}

void test_what_ends_a_wait() {
  for (const Place place : {Place::streams, Place::pinned_streams}) check_ends(place);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv), {TM_CASE(test_sums), TM_CASE(test_faults_are_found),
                                                TM_CASE(test_what_ends_a_wait)});
}
