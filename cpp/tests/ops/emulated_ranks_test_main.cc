// The order of exchanges on several emulated GPUs and in streams of one: steps whose counts grow,
// captured steps, ranks that never come, and the faults that the seeds must show.
#include <algorithm>
#include <memory>
#include <vector>

#include "cuda/emulated_gpu.h"
#include "cuda/emulator.h"
#include "tests/check.h"
#include "tests/ops/gpu_ranks.h"

namespace turbomind {
namespace {

constexpr int kSteps = 3, kExchanges = 3;
constexpr int kRows = 2, kCols = 8, kStride = 12;
constexpr size_t kPartFloats = size_t(kRows) * kStride, kPartBytes = kPartFloats * sizeof(float);

// x += the sum of the parts in one of the buffers.
DeviceRankSum small_sum(TestRanks& ranks, int r, uint32_t number, int buffer, float* x) {
  DeviceRankSum s;
  s.exchange = ranks.exchange(r, number);
  for (int i = 0; i < ranks.size(); ++i) s.parts[i] = ranks[i].parts[buffer];
  s.part_stride = s.x_stride = kStride;
  s.x = x;
  s.rows = kRows;
  s.cols = kCols;
  s.add = true;
  return s;
}

// What a rank adds in an exchange of a run.
constexpr float value_of(int rank, int exchange) {
  return static_cast<float>((rank + 1) * (exchange + 1));
}

struct Run {
  bool waits = true;
  int buffers = 2;
  uint32_t base = 0;  // at the start of the first step; the counts pass it modulo 2^32
};

// Submits the steps of a rank. Each of their exchanges adds all ranks' values to x.
class StepRank {
 public:
  StepRank(TestRanks& ranks, int r, const Run& run)
      : ranks_(ranks),
        r_(r),
        run_(run),
        x_(ranks[r].gpu, std::vector<float>(kPartFloats, 0)),
        bases_(ranks[r].gpu, kSteps * sizeof(uint32_t)),
        source_(ranks[r].gpu, kSteps * kExchanges * kPartBytes) {
    for (int step = 0; step < kSteps; ++step)
      bases_.as<uint32_t>()[step] = run.base + static_cast<uint32_t>(step * kExchanges);
    for (int e = 0; e < kSteps * kExchanges; ++e)
      std::fill_n(source_.as<float>() + e * kPartFloats, kPartFloats, value_of(r, e));
  }
  void submit() {
    for (int e = 0; e < kSteps * kExchanges; ++e) submit(e);
  }
  std::vector<float> x() const { return x_.get(); }

 private:
  void submit(int e) {
    TestRank& rank = ranks_[r_];
    if (e % kExchanges == 0)
      rank.copy(rank.base.data(), bases_.as<uint32_t>() + e / kExchanges, sizeof(uint32_t));
    const int buffer = e % run_.buffers;
    rank.copy(rank.parts[buffer], source_.data() + e * kPartBytes, kPartBytes);
    const uint32_t number = static_cast<uint32_t>(e % kExchanges) + 1;
    DeviceRankSum s = small_sum(ranks_, r_, number, buffer, x_.data());
    s.exchange.waits &= run_.waits;
    ranks_.sum(r_, s);
  }

  TestRanks& ranks_;
  const int r_;
  const Run run_;
  GpuArray<float> x_;
  PinnedBuffer bases_, source_;
};

// Returns whether all ranks have the right sums.
bool run_steps(TestRanks& ranks, uint64_t seed, const Run& run) {
  emulator::set_schedule_seed(seed);
  ranks.set_counters(run.base);
  std::vector<std::unique_ptr<StepRank>> all;
  for (int r = 0; r < ranks.size(); ++r) all.push_back(std::make_unique<StepRank>(ranks, r, run));
  for (const auto& rank : all) rank->submit();
  ranks.synchronize();
  float expected = 0;
  for (int e = 0; e < kSteps * kExchanges; ++e)
    for (int r = 0; r < ranks.size(); ++r) expected += value_of(r, e);
  for (const auto& rank : all) {
    const std::vector<float> x = rank->x();
    for (int row = 0; row < kRows; ++row)
      for (int i = 0; i < kCols; ++i)
        if (x[size_t(row) * kStride + i] != expected) return false;
  }
  return true;
}

void test_steps() {
  for (const Place place : {Place::peers, Place::pinned, Place::streams, Place::pinned_streams})
    for (const int count : {2, 3}) {
      TestRanks ranks(count, place, 256);
      for (uint64_t seed = 0; seed < 30; ++seed)
        CHECK(run_steps(ranks, seed, {true, 2, static_cast<uint32_t>(seed) * 1000}),
              "seed %d of %d ranks, %s", int(seed), count, place_name(place));
      CHECK(run_steps(ranks, 0, {true, 2, 0xfffffffau}));  // the counts begin again at 0
      CHECK(ranks.stop() == 0);
    }
}

void test_steps_with_blocks_at_once() {
  emulator::run_blocks_at_once(2);
  TestRanks ranks(2, Place::peers, 256);
  for (uint64_t seed = 0; seed < 20; ++seed) CHECK(run_steps(ranks, seed, {}));
  emulator::run_blocks_at_once(0);
}

// What the seeds are for: they show a wait that is not there and a buffer that is not doubled.
void test_faults_show() {
  for (const Place place : {Place::peers, Place::streams}) {
    TestRanks ranks(place == Place::peers ? 2 : 3, place, 256);
    int without_wait = 0, one_buffer = 0;
    for (uint64_t seed = 0; seed < 30; ++seed) {
      without_wait += !run_steps(ranks, seed, {false, 2, 0});
      one_buffer += !run_steps(ranks, seed, {true, 1, 0});
    }
    CHECK(without_wait > 10 && one_buffer > 10, "%d without a wait, %d with one buffer",
          without_wait, one_buffer);
  }
}

// A step as a graph: two exchanges with their copies. It is launched again with other values and
// another base.
void test_graphs() {
  TestRanks ranks(2, Place::peers, 256);
  for (uint64_t seed = 0; seed < 10; ++seed) {
    emulator::set_schedule_seed(seed);
    ranks.set_counters(0);
    std::vector<std::unique_ptr<GpuArray<float>>> x;
    std::vector<PinnedBuffer> sources;
    std::vector<GpuGraph> graphs;
    for (int r = 0; r < 2; ++r) {
      x.push_back(
          std::make_unique<GpuArray<float>>(ranks[r].gpu, std::vector<float>(kPartFloats, 0)));
      sources.emplace_back(ranks[r].gpu, kPartBytes);
      graphs.emplace_back(ranks[r].stream, [&] {
        for (const uint32_t number : {1u, 2u}) {
          ranks[r].copy(ranks[r].parts[number % 2], sources[r].data(), kPartBytes);
          ranks.sum(r, small_sum(ranks, r, number, number % 2, x[r]->data()));
        }
      });
    }
    float expected = 0;
    for (int launch = 0; launch < 5; ++launch) {
      ranks.set_base(static_cast<uint32_t>(2 * launch));
      for (int r = 0; r < 2; ++r) {
        std::fill_n(sources[r].as<float>(), kPartFloats, value_of(r, launch));
        expected += 2 * value_of(r, launch);
      }
      for (int r = 0; r < 2; ++r) graphs[r].launch(ranks[r].stream);
      ranks.synchronize();
      for (int r = 0; r < 2; ++r)
        CHECK(x[r]->get()[kCols - 1] == expected, "seed %d, launch %d", int(seed), launch);
    }
  }
}

// After a meeting each rank copies what the next one had before it.
void test_meet() {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    emulator::set_schedule_seed(seed);
    TestRanks ranks(3, Place::peers, 256);
    std::vector<PinnedBuffer> in, out;
    for (int r = 0; r < 3; ++r) {
      in.push_back(pinned(ranks[r].gpu, std::vector<float>{value_of(r, 4)}));
      out.emplace_back(ranks[r].gpu, 4);
    }
    for (int r = 0; r < 3; ++r) {
      ranks[r].copy(ranks[r].parts[0], in[r].data(), 4);
      ranks.meet(r, ranks.exchange(r, 1));
      ranks[r].copy(out[r].data(), ranks[(r + 1) % 3].parts[0], 4);
    }
    ranks.synchronize();
    for (int r = 0; r < 3; ++r)
      CHECK(*out[r].as<float>() == value_of((r + 1) % 3, 4), "seed %d", int(seed));
  }
}

// ---- Ranks that do not come.

// Every kind of exchange.
void submit_one(TestRanks& ranks, int r, int kind, uint32_t number, float* x) {
  if (kind == 0) return ranks.meet(r, ranks.exchange(r, number));
  if (kind == 1) return ranks.sum(r, small_sum(ranks, r, number, number % 2, x));
  DeviceRankColumns c;
  c.exchange = ranks.exchange(r, number);
  for (int i = 0; i < ranks.size(); ++i) {
    c.parts[i] = ranks[i].parts[number % 2];
    c.part_strides[i] = 4;
    c.begin[i + 1] = 4 * (i + 1);
  }
  c.y = x;
  c.y_stride = 16;
  c.rows = kRows;
  ranks.columns(r, c);
}

void test_a_rank_that_never_comes() {
  for (int kind = 0; kind < 3; ++kind)
    for (uint64_t seed = 0; seed < 6; ++seed) {
      emulator::set_schedule_seed(seed);
      TestRanks ranks(3, Place::peers, 256);
      const GpuArray<float> x0(ranks[0].gpu, 256), x1(ranks[1].gpu, 256);
      emulator::set_wait_limit(0);
      submit_one(ranks, 0, kind, 1, x0.data());
      submit_one(ranks, 1, kind, 1, x1.data());
      ranks.synchronize();
      // Whose time runs out first stops the other.
      const uint32_t first = ranks.missing(0), second = ranks.missing(1);
      CHECK(ranks.stop() == 1 && std::max(first, second) == 3 && std::min(first, second) == 0,
            "missing %u and %u, stop %u", first, second, ranks.stop());
      ranks.missing(0) = ranks.missing(1) = 0;
      // Later waits end at once, and report nothing.
      emulator::set_wait_limit(600);
      for (const uint32_t number : {2u, 3u, 4u}) submit_one(ranks, 0, kind, number, x0.data());
      ranks.synchronize();
      CHECK(ranks.missing(0) == 0 && ranks.missing(1) == 0 && ranks.stop() == 1);
      emulator::set_wait_limit(10);
    }
}

void test_the_first_of_several_missing_ranks() {
  emulator::set_wait_limit(0);
  for (uint64_t seed = 0; seed < 16; ++seed)  // of the order in which threads see that time is up
    for (const int own : {0, 1, 2}) {
      TestRanks ranks(4, Place::pinned, 256);
      emulator::set_schedule_seed(seed);
      ranks.meet(own, ranks.exchange(own, 1));
      ranks.synchronize();
      CHECK(ranks.missing(own) == (own == 0 ? 2u : 1u) && ranks.stop() == 1,
            "seed %d: rank %d misses %u", int(seed), own, ranks.missing(own));
    }
  emulator::set_wait_limit(10);
}

void test_the_host_ends_waits() {
  emulator::set_wait_limit(600);
  TestRanks ranks(2, Place::peers, 256);
  ranks.stop() = 7;
  ranks.meet(0, ranks.exchange(0, 1));
  ranks.synchronize();
  CHECK(ranks.stop() == 7 && ranks.missing(0) == 0);
  emulator::set_wait_limit(10);
}

// The first reason stays.
void test_missing_is_not_overwritten() {
  emulator::set_wait_limit(0);
  TestRanks ranks(2, Place::peers, 256);
  ranks.missing(0) = 9;
  ranks.meet(0, ranks.exchange(0, 1));
  ranks.synchronize();
  CHECK(ranks.stop() == 1 && ranks.missing(0) == 9);
  emulator::set_wait_limit(10);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv,
                   {
                       TM_CASE(test_steps),
                       TM_CASE(test_steps_with_blocks_at_once),
                       TM_CASE(test_faults_show),
                       TM_CASE(test_graphs),
                       TM_CASE(test_meet),
                       TM_CASE(test_a_rank_that_never_comes),
                       TM_CASE(test_the_first_of_several_missing_ranks),
                       TM_CASE(test_the_host_ends_waits),
                       TM_CASE(test_missing_is_not_overwritten),
                   });
}
