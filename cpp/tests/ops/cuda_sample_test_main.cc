// The GPU's sampler against sorted rows in double precision. In emulation, or with "--gpu" on the
// first real one.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "cuda/dispatch.h"
#include "cuda/emulator.h"
#include "ops/sample_cuda.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"
#include "tests/cuda/gpu_array.h"
#include "tests/sampling/logits_rows.h"

namespace turbomind {

TM_GPU_TABLE(SampleCuda, kSampleCuda, sample_cuda)

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int32_t kPoison = -77;

// Own generator for inputs: SplitMix64.
struct Rng {
  uint64_t s;
  explicit Rng(uint64_t stream) : s(stream + test_seed) {}
  uint64_t next() {
    uint64_t z = (s += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  double normal() {
    return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform());
  }
};

Gpu& gpu() {
  static Gpu* const one = real != nullptr ? real : open_gpu(GpuKind::emulated, 0).release();
  return *one;
}

constexpr size_t kMostRows = 400;

// By `spread` blocks a row. What passes leave each other is as it was: the next launch uses it.
SharedVector<int32_t> sample(LogitsRows& rows, const std::vector<SampleRow>& asked,
                             int spread = 1) {
  static auto& scratch = *new GpuArray(gpu(), std::vector<SampleScratch>(kMostRows));
  const SharedVector<SampleRow> jobs(asked.begin(), asked.end());
  SharedVector<int32_t> tokens(jobs.size(), kPoison);
  CHECK(jobs.size() <= kMostRows, "%zu rows", jobs.size());
  DeviceSampling s;
  s.logits = rows.data.data();
  s.stride = rows.stride;
  s.vocab = rows.vocab;
  s.num_rows = static_cast<int32_t>(jobs.size());
  s.rows = jobs.data();
  s.tokens = tokens.data();
  s.scratch = scratch.data();
  s.spread = spread;
  s.needs = sample_needs(asked.data(), s.num_rows);
  sample_cuda(kind()).sample(nullptr, s);
  finish_kernels();
  for (const SampleScratch& t : scratch.get())
    CHECK(t.arrived == 0 && std::count(t.bins, t.bins + kSampleBins, 0u) == kSampleBins,
          "scratch is not as it was");
  return tokens;
}

// Tokens from the likeliest on, lower ids first, as many as the parameters keep. `slack` moves the
// cuts of top-p and min-p: what lies between the two is a matter of rounding.
std::vector<int32_t> candidates(const float* logits, int vocab, const SampleRow& p, double slack) {
  std::vector<int32_t> ids;
  for (int i = 0; i < vocab; ++i)
    if (logits[i] > -kInf) ids.push_back(i);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  const double max = logits[ids[0]];
  const auto weight = [&](int32_t id) { return std::exp((logits[id] - max) / p.temperature); };
  if (p.top_k > 0 && p.top_k < static_cast<int>(ids.size())) ids.resize(p.top_k);
  double total = 0, mass = 0;
  for (int32_t id : ids) total += weight(id);
  for (size_t i = 0; p.top_p < 1 && i < ids.size(); ++i) {
    mass += weight(ids[i]);
    if (mass >= (static_cast<double>(p.top_p) + slack) * total) ids.resize(i + 1);
  }
  std::erase_if(ids, [&](int32_t id) { return weight(id) < p.min_p * (1 - 2 * slack); });
  std::sort(ids.begin(), ids.end());
  return ids;
}

// Returns whether the cumulative mass of `ids` passes u at `token`, give or take 1e-5.
bool plausible(const float* logits, const std::vector<int32_t>& ids, const SampleRow& p,
               int32_t token) {
  double max = -kInf, total = 0, before = 0;
  for (int32_t id : ids) max = std::max<double>(max, logits[id]);
  const auto weight = [&](int32_t id) { return std::exp((logits[id] - max) / p.temperature); };
  for (int32_t id : ids) total += weight(id);
  const double u = static_cast<double>(p.uniform) * 0x1p-53;
  for (int32_t id : ids) {
    const double after = before + weight(id) / total;
    if (id == token) return before - 1e-5 <= u && u <= after + 1e-5;
    before = after;
  }
  return false;
}

void check_row(LogitsRows& rows, const SampleRow& job, int32_t token) {
  const float* logits = rows.row(job.logits_row);
  CHECK(token >= 0 && token < rows.vocab,
        "token %d of %d, row %d, T %g, top-k %d, top-p %g, min-p %g", token, rows.vocab,
        job.logits_row, job.temperature, job.top_k, job.top_p, job.min_p);
  bool fine = false;
  for (double slack : {0.0, -1e-6, 1e-6})
    fine = fine || plausible(logits, candidates(logits, rows.vocab, job, slack), job, token);
  CHECK(fine, "token %d, vocab %d, T %g, top-k %d, top-p %g, min-p %g, u %g", token, rows.vocab,
        job.temperature, job.top_k, job.top_p, job.min_p,
        static_cast<double>(job.uniform) * 0x1p-53);
}

// Fills a row: 0 normal, 1 of few distinct values, 2 all equal, 3 one token far above the others,
// 4 with banned tokens, 5 far below zero.
void fill(Rng& rng, int kind, float* x, int vocab) {
  for (int i = 0; i < vocab; ++i) {
    x[i] = static_cast<float>(3 * rng.normal());
    if (kind == 1) x[i] = std::round(x[i]);
    if (kind == 2) x[i] = 1.5f;
    if (kind == 4 && rng.uniform() < 0.5) x[i] = -kInf;
    if (kind == 5) x[i] -= 4000;
  }
  if (kind == 3) x[static_cast<int>(rng.uniform() * vocab)] = 200;
  if (kind == 4) x[vocab - 1] = 2;
}

SampleRow random_job(Rng& rng, int row, int out, int vocab) {
  SampleRow job;
  job.logits_row = row;
  job.out = out;
  job.temperature = static_cast<float>(0.3 + 1.5 * rng.uniform());
  if (rng.uniform() < 0.4) job.top_k = 2 + static_cast<int>(rng.uniform() * vocab);
  if (rng.uniform() < 0.2) job.top_k = 40;
  if (rng.uniform() < 0.5) job.top_p = static_cast<float>(rng.uniform());
  if (rng.uniform() < 0.3) job.min_p = static_cast<float>(0.2 * rng.uniform());
  job.uniform = rng.next() >> 11;
  if (rng.uniform() < 0.05) job.uniform = 0;
  if (rng.uniform() < 0.05) job.uniform = (uint64_t{1} << 53) - 1;
  return job;
}

void test_against_reference() {
  Rng rng{1};
  for (int vocab : {1, 5, 37, 1024, 4096, 4099, 20001}) {
    LogitsRows rows(6, vocab);
    for (int r = 0; r < 6; ++r) fill(rng, r, rows.row(r), vocab);
    std::vector<SampleRow> jobs;
    for (int i = 0; i < (vocab > 5000 ? 16 : 40); ++i)
      jobs.push_back(random_job(rng, i % 6, i, vocab));
    const SharedVector<int32_t> tokens = sample(rows, jobs);
    for (size_t i = 0; i < jobs.size(); ++i) check_row(rows, jobs[i], tokens[i]);
    // Alone, with other warps in front and other blocks: the same tokens.
    emulator::set_schedule_seed(99);
    constexpr int kSpreads[] = {4, 2, 32, 2, 8, 16};
    for (size_t i = 0; i < 6; ++i) {
      SampleRow job = jobs[i];
      job.out = 0;
      CHECK(sample(rows, {job}, kSpreads[i])[0] == tokens[i], "row %zu alone", i);
    }
  }
}

void test_greedy_and_padding() {
  Rng rng{2};
  LogitsRows rows(3, 9000);
  for (int r = 0; r < 3; ++r) fill(rng, 0, rows.row(r), 9000);
  rows.row(0)[8999] = rows.row(0)[4100] = 50;  // the lower id of equals
  rows.row(1)[0] = 50;
  rows.row(2)[5000] = 50;
  std::vector<SampleRow> jobs(4);
  for (int i = 0; i < 4; ++i) jobs[i].logits_row = i, jobs[i].out = 3 - i;
  jobs[0].temperature = 0;
  jobs[1].top_k = 1;
  jobs[2].temperature = 1e-38f, jobs[2].uniform = uint64_t{1} << 52;
  jobs[3].logits_row = -1;
  const SharedVector<int32_t> tokens = sample(rows, jobs, 2);
  CHECK(tokens[3] == 4100 && tokens[2] == 0 && tokens[1] == 5000, "%d %d %d", tokens[3], tokens[2],
        tokens[1]);
  CHECK(tokens[0] == kPoison, "padding wrote %d", tokens[0]);
}

// Zeros are equal, whatever their sign.
void test_signs_of_zero() {
  LogitsRows rows(1, 5000);
  std::fill_n(rows.row(0), 5000, -1.0f);
  rows.row(0)[17] = -0.0f;
  rows.row(0)[4999] = 0.0f;
  SampleRow greedy;
  greedy.temperature = 0;
  CHECK(sample(rows, {greedy})[0] == 17, "%d", sample(rows, {greedy})[0]);
}

// Parts of a row that no block has at once.
void test_large_vocabulary() {
  constexpr int kVocab = 135001, kPart = 4224;  // of 32
  Rng rng{6};
  LogitsRows rows(2, kVocab);
  for (int r = 0; r < 2; ++r) fill(rng, 0, rows.row(r), kVocab);
  rows.row(1)[3 * kPart + 4200] = 200;
  std::vector<SampleRow> jobs;
  for (int i = 0; i < 3; ++i) jobs.push_back(random_job(rng, i % 2, i, kVocab));
  const SharedVector<int32_t> tokens = sample(rows, jobs, sample_spread(3, kVocab, 132));
  for (size_t i = 0; i < jobs.size(); ++i) check_row(rows, jobs[i], tokens[i]);
  CHECK(tokens[1] == 3 * kPart + 4200, "%d", tokens[1]);
}

void test_bad_rows() {
  LogitsRows rows(4, 5000);
  Rng rng{3};
  for (int r = 0; r < 4; ++r) fill(rng, 0, rows.row(r), 5000);
  rows.row(0)[4999] = std::numeric_limits<float>::quiet_NaN();
  rows.row(1)[17] = kInf;
  std::fill_n(rows.row(2), 5000, -kInf);
  std::vector<SampleRow> jobs(4);
  for (int i = 0; i < 4; ++i) jobs[i].logits_row = jobs[i].out = i;
  jobs[2].temperature = 0;
  const SharedVector<int32_t> tokens = sample(rows, jobs);
  CHECK(tokens[0] == -1 && tokens[1] == -1 && tokens[2] == -1 && tokens[3] >= 0, "%d %d %d %d",
        tokens[0], tokens[1], tokens[2], tokens[3]);
}

// Each token is sampled as often as its probability demands: u runs over an even grid.
void test_distribution() {
  constexpr int kSamples = 400;
  Rng rng{4};
  LogitsRows rows(1, 37);
  fill(rng, 0, rows.row(0), 37);
  std::vector<SampleRow> jobs(kSamples);
  std::vector<int> count(37);
  for (int i = 0; i < kSamples; ++i) {
    jobs[i].out = i;
    jobs[i].uniform = (uint64_t{1} << 53) / kSamples * i;
  }
  for (int32_t token : sample(rows, jobs)) ++count[token];
  double total = 0;
  for (int i = 0; i < 37; ++i) total += std::exp(static_cast<double>(rows.row(0)[i]));
  for (int i = 0; i < 37; ++i) {
    const double wanted = kSamples * std::exp(static_cast<double>(rows.row(0)[i])) / total;
    CHECK(std::abs(count[i] - wanted) <= 1, "token %d: %d times, expected %g", i, count[i], wanted);
  }
}

// Equal logits at the cut lie in several blocks; the lowest ids of all stay.
void test_ties_across_blocks() {
  constexpr int kVocab = 8192, kSamples = 8;  // parts of 256
  LogitsRows rows(1, kVocab);
  std::fill_n(rows.row(0), kVocab, -30.0f);
  for (int i = 0; i < 8; ++i) rows.row(0)[1000 * i + 100] = 1.0f;
  rows.row(0)[8000] = 2.0f;  // weighs 1, the eight in front of it 0.368 each
  const auto check = [&](int top_k, float top_p, int spread, std::vector<int32_t> expected) {
    std::vector<SampleRow> jobs(kSamples);
    for (int i = 0; i < kSamples; ++i) {
      jobs[i].out = i;
      jobs[i].uniform = (uint64_t{1} << 53) / kSamples * i;
      jobs[i].top_k = top_k, jobs[i].top_p = top_p;
    }
    const SharedVector<int32_t> sampled = sample(rows, jobs, spread);
    std::vector<int32_t> seen(sampled.begin(), sampled.end());  // ascending, as u is
    seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
    CHECK(seen == expected, "top-k %d, top-p %g, %d blocks: %zu tokens", top_k, top_p, spread,
          seen.size());
  };
  for (const int spread : {2, 8}) {
    check(4, 1.0f, spread, {100, 1100, 2100, 8000});
    check(4, 0.7f, spread, {100, 1100, 8000});         // 1.47 of 2.10
    check(0, 0.45f, spread, {100, 1100, 2100, 8000});  // 1.77 of 3.94
  }
}

void test_spread() {
  CHECK(sample_spread(1, 152064, 132) == 32, "%d", sample_spread(1, 152064, 132));
  CHECK(sample_spread(8, 152064, 132) == 16, "%d", sample_spread(8, 152064, 132));
  CHECK(sample_spread(1, 4096, 132) == 1, "%d", sample_spread(1, 4096, 132));
  CHECK(sample_spread(256, 152064, 132) == 1, "%d", sample_spread(256, 152064, 132));
  LogitsRows rows(1, 8);
  std::fill_n(rows.row(0), 8, 0.0f);
  for (const int spread : {0, 3, 64}) {
    bool refused = false;
    try {
      sample(rows, {SampleRow{}}, spread);
    } catch (const Error&) {
      refused = true;
    }
    CHECK(refused, "%d blocks a row were taken", spread);
  }
}

// The blocks of a row run interleaved, and see each other's stores as late as a GPU may show them.
void test_blocks_at_once() {
  if (real != nullptr) return;
  emulator::run_blocks_at_once(4);
  test_greedy_and_padding();
  test_bad_rows();
  test_ties_across_blocks();
  emulator::run_blocks_at_once(0);
}

void test_bytes() {
  if (real != nullptr) return;                                       // only the emulator counts
  constexpr int kVocab = 20000, kSpread = 4, kJobBytes = 1024 * 32;  // fields, by every thread
  Rng rng{5};
  LogitsRows rows(1, kVocab);
  fill(rng, 0, rows.row(0), kVocab);
  SampleRow job;
  job.temperature = 0;
  emulator::reset_counters();
  sample(rows, {job}, kSpread);
  const auto best = emulator::counters("sample_best");
  // The row once, and what four blocks left; the counter is read four times.
  CHECK(best.bytes_loaded == kVocab * 4 + kSpread * (kJobBytes + 8 + 4 + 4 + 4), "%lld",
        static_cast<long long>(best.bytes_loaded));
  CHECK(emulator::counters("sample_pick").launches == 0, "greedy rows were sampled");
  job.temperature = 1, job.top_p = 0.9f;
  emulator::reset_counters();
  sample(rows, {job}, kSpread);
  CHECK(emulator::counters("sample_cut").launches == 3, "%lld passes",
        static_cast<long long>(emulator::counters("sample_cut").launches));
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv), {
                                                   TM_CASE(test_greedy_and_padding),
                                                   TM_CASE(test_bad_rows),
                                                   TM_CASE(test_signs_of_zero),
                                                   TM_CASE(test_large_vocabulary),
                                                   TM_CASE(test_against_reference),
                                                   TM_CASE(test_distribution),
                                                   TM_CASE(test_ties_across_blocks),
                                                   TM_CASE(test_spread),
                                                   TM_CASE(test_blocks_at_once),
                                                   TM_CASE(test_bytes),
                                               });
}
