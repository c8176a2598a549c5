// Log-probabilities on the GPU against sorted rows in double precision. In emulation, or with
// "--gpu" on the first real one.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/dispatch.h"
#include "cuda/emulator.h"
#include "ops/logprobs_cuda.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"
#include "tests/sampling/logits_rows.h"

namespace turbomind {

TM_GPU_TABLE(LogprobsCuda, kLogprobsCuda, logprobs_cuda)

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr Logprob kUntouched{-77, 77};

void expect(bool ok, const std::string& what) {
  if (ok) return;
  std::printf("cuda_logprobs_test: expected %s\n", what.c_str());
  std::exit(1);
}

// 0 normal, 1 of few distinct values, 2 all equal, 3 one far above the others, 4 with banned
// tokens, 5 far below zero, 6 zeros of both signs, 7 ascending, so that one end has the likeliest.
constexpr int kKinds = 8;

void fill(std::mt19937& random, int kind, float* x, int vocab) {
  std::normal_distribution<float> normal(0, 3);
  for (int i = 0; i < vocab; ++i) {
    x[i] = normal(random);
    if (kind == 1) x[i] = std::round(x[i]);
    if (kind == 2) x[i] = 1.5f;
    if (kind == 4 && random() % 2 == 0) x[i] = -kInf;
    if (kind == 5) x[i] -= 4000;
    if (kind == 6) x[i] = random() % 2 == 0 ? 0.0f : -0.0f;
    if (kind == 7) x[i] = static_cast<float>(i) * 1e-3f;
  }
  if (kind == 3) x[random() % vocab] = 200;
  if (kind == 4) x[vocab - 1] = 2;
}

struct Job {
  int row = 0;
  int32_t token = 0;
  int top = 0;
};

// The entries of each job.
std::vector<std::vector<Logprob>> report(LogitsRows& rows, const std::vector<Job>& jobs) {
  SharedVector<LogprobRow> asked;
  SharedVector<int32_t> tokens(jobs.size());
  int32_t end = 0;
  for (size_t i = 0; i < jobs.size(); ++i) {  // tokens in another order than rows
    const auto sampled = static_cast<int32_t>(jobs.size() - 1 - i);
    tokens[sampled] = jobs[i].token;
    asked.push_back({jobs[i].row, sampled, jobs[i].top, end});
    end += 1 + jobs[i].top;
  }
  SharedVector<Logprob> out(end + 1, kUntouched);
  DeviceLogprobs p;
  p.logits = rows.data.data();
  p.stride = rows.stride;
  p.vocab = rows.vocab;
  p.num_rows = static_cast<int32_t>(jobs.size());
  p.rows = asked.data();
  p.tokens = tokens.data();
  p.out = out.data();
  logprobs_cuda(kind()).logprobs(nullptr, p);
  finish_kernels();
  expect(out[end].token == kUntouched.token, "nothing after the last entry");
  std::vector<std::vector<Logprob>> entries;
  for (const LogprobRow& row : asked)
    entries.emplace_back(out.begin() + row.out, out.begin() + row.out + 1 + row.top);
  return entries;
}

bool near(float got, double wanted) {
  if (std::isinf(wanted)) return got == wanted;
  return std::abs(got - wanted) <= 1e-6 + 1.2e-7 * std::abs(wanted);
}

void check_job(LogitsRows& rows, const Job& job, const std::vector<Logprob>& got) {
  const float* x = rows.row(job.row);
  std::vector<int32_t> ids(rows.vocab);
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
  double sum = 0;
  for (int32_t id : ids) sum += std::exp(static_cast<double>(x[id]) - x[ids[0]]);
  const double lse = x[ids[0]] + std::log(sum);
  const std::string name = "row " + std::to_string(job.row) + " of " + std::to_string(rows.vocab) +
                           ", top " + std::to_string(job.top);
  expect(got[0].token == job.token && near(got[0].logprob, x[job.token] - lse),
         "the sampled token's, " + name + ": " + std::to_string(got[0].logprob));
  for (int i = 0; i < job.top; ++i)
    expect(got[i + 1].token == ids[i] && near(got[i + 1].logprob, x[ids[i]] - lse),
           "the likeliest, " + name + ": place " + std::to_string(i) + " has " +
               std::to_string(got[i + 1].token) + " with " + std::to_string(got[i + 1].logprob));
}

bool same_bits(const std::vector<Logprob>& a, const std::vector<Logprob>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.token == y.token && x.logprob == y.logprob;
  });
}

void test_against_reference() {
  std::mt19937 random(1 + test_seed);
  for (const int vocab : {1, 5, 37, 1024, 4099, 20001, 135001}) {
    LogitsRows rows(kKinds, vocab);
    std::vector<Job> jobs;
    for (int r = 0; r < kKinds; ++r) {
      fill(random, r, rows.row(r), vocab);
      std::vector<int> tops = {0, 1, 5, 20, 33, kMostTopTokens};
      if (vocab > 20001) tops = {0, r % 2 == 0 ? 20 : kMostTopTokens};
      for (const int top : tops)
        if (top <= vocab) jobs.push_back({r, static_cast<int32_t>(random() % vocab), top});
      if (vocab < kMostTopTokens)
        jobs.push_back({r, static_cast<int32_t>(random() % vocab), vocab});
    }
    const auto got = report(rows, jobs);
    for (size_t i = 0; i < jobs.size(); ++i) check_job(rows, jobs[i], got[i]);
    // Alone, with other warps in front: the same bits.
    emulator::set_schedule_seed(99);
    for (size_t i = 0; i < jobs.size(); i += 7)
      expect(same_bits(report(rows, {jobs[i]})[0], got[i]), "the same bits alone");
  }
}

// A row that no token was sampled from is left alone.
void test_bad_rows() {
  std::mt19937 random(2 + test_seed);
  LogitsRows rows(2, 3000);
  for (int r = 0; r < 2; ++r) fill(random, 0, rows.row(r), 3000);
  rows.row(0)[17] = std::numeric_limits<float>::quiet_NaN();
  const auto got = report(rows, {{0, -1, 5}, {1, 9, 5}});
  for (const Logprob& entry : got[0])
    expect(entry.token == kUntouched.token, "no entry of a row without a token");
  check_job(rows, {1, 9, 5}, got[1]);
}

void test_bytes() {
  if (real != nullptr) return;  // only the emulator counts
  constexpr int kVocab = 20000;
  std::mt19937 random(3 + test_seed);
  LogitsRows rows(2, kVocab);
  fill(random, 0, rows.row(0), kVocab);
  fill(random, 2, rows.row(1), kVocab);
  const int64_t job = 1024 * (sizeof(LogprobRow) + 4) + 4, row = kVocab * 4;
  const auto loaded = [&](int r, int top) {
    emulator::reset_counters();
    report(rows, {{r, 3, top}});
    return emulator::counters("logprob_rows").bytes_loaded;
  };
  expect(loaded(0, 0) == job + 2 * row, "two passes for a token alone");
  expect(loaded(0, 20) == job + 3 * row, "three passes for the likeliest");
  expect(loaded(1, 20) == job + 9 * row, "nine passes over equals");
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv), {
                                                   TM_CASE(test_against_reference),
                                                   TM_CASE(test_bad_rows),
                                                   TM_CASE(test_bytes),
                                               });
}
