#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "cpu/isa_dispatch.h"
#include "sampling/candidates.h"
#include "sampling/row_kernels.h"
#include "sampling/sampler_state.h"

namespace turbomind {

TM_KERNEL_TABLE(row::RowKernels, row_kernels)

namespace {

using row::Candidate;
using row::kRowBlock;

// A nucleus is first searched among this many of the likeliest tokens.
constexpr int64_t kFirstCandidates = 1024;
// The histogram of a wide nucleus: bins of 1/128 in (max - logit) / temperature; the last bin takes
// everything below exp(-32) of the maximum.
constexpr int kBins = 4096;
constexpr float kBinsPerUnit = kBins / 32.0f;

// Kernels and buffers of one worker, sized once.
struct Scratch {
  const row::RowKernels* kernels = nullptr;
  std::vector<float> logits;   // edited copy of the row
  std::vector<float> weights;  // exp((logit - max) / T), zero where dropped; whole blocks
  std::vector<double> sums;    // of weights, by block
  std::vector<float> block_max;
  std::vector<float> selection;
  std::vector<double> bins;
  std::vector<Candidate> candidates;

  void prepare(const row::RowKernels& table, int64_t vocab) {
    kernels = &table;
    if (!block_max.empty()) return;
    const size_t nb = row::blocks(vocab);
    weights.resize(nb * kRowBlock);
    sums.resize(nb);
    bins.resize(kBins);
    block_max.resize(nb);
    selection.reserve(nb);
    candidates.reserve(kFirstCandidates * 4);
  }
};

struct Row {
  const float* logits;  // processed
  int64_t vocab;
  float max;  // finite
};

float inverse_temperature(float t) {
  return 1.0f / std::max(t, 1e-30f);
}

// Drops everything after the first tokens whose mass reaches p * total. Returns false when the mass
// of all candidates does not reach it.
bool cut_top_p(std::vector<Candidate>& c, double p, double total) {
  std::sort(c.begin(), c.end(), row::before);
  double mass = 0;
  for (size_t i = 0; i < c.size(); ++i) {
    mass += c[i].weight;
    if (mass >= p * total) {
      c.resize(i + 1);
      return true;
    }
  }
  return false;
}

// Returns the least logit within min-p: its probability is at least min_p times the maximum's.
double min_p_floor(const Row& row, const SamplingParams& p) {
  if (p.min_p <= 0) return -std::numeric_limits<double>::infinity();
  return row.max + p.temperature * std::log(static_cast<double>(p.min_p));
}

// Inverts the cumulative distribution over the candidates in ascending id order.
int32_t sample_candidates(std::vector<Candidate>& c, const Row& row, const SamplingParams& p,
                          double u) {
  const double floor = min_p_floor(row, p);
  std::erase_if(c, [&](const Candidate& x) { return x.logit < floor; });
  std::sort(c.begin(), c.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  double total = 0;
  for (const Candidate& x : c) total += x.weight;
  double mass = 0;
  int32_t last = c.front().id;
  for (const Candidate& x : c) {
    if (x.weight == 0) continue;
    mass += x.weight;
    last = x.id;
    if (mass > u * total) return x.id;
  }
  return last;  // u * total was rounded up to the total
}

int32_t sample_top_k(const Row& row, const SamplingParams& p, double u, Scratch& s) {
  row::select_top(row.logits, row.vocab, p.top_k, s.block_max.data(), s.selection, s.candidates);
  std::sort(s.candidates.begin(), s.candidates.end(), row::before);
  double total = 0;
  for (Candidate& c : s.candidates) {
    c.weight = std::exp((static_cast<double>(c.logit) - row.max) / p.temperature);
    total += c.weight;
  }
  if (p.top_p < 1) cut_top_p(s.candidates, p.top_p, total);
  return sample_candidates(s.candidates, row, p, u);
}

// Writes the bin of each logit of one block: monotone in the logit, so bins partition the order of
// tokens.
void bin_block(const float* x, int64_t len, float max, float scale, int32_t* bin) {
  for (int64_t i = 0; i < len; ++i) {
    const float d = (max - x[i]) * scale;
    bin[i] = static_cast<int32_t>(std::min(d, static_cast<float>(kBins - 1)));
  }
}

// Zeroes the weights outside a nucleus too wide for a few candidates: the histogram finds the bin
// in which the mass reaches p * total, and only that bin's tokens are sorted.
void drop_outside_top_p(const Row& row, double p, double total, float inv_t, Scratch& s) {
  const float scale = std::min(inv_t * kBinsPerUnit, 1e30f);
  int32_t bin[kRowBlock];
  std::fill(s.bins.begin(), s.bins.end(), 0.0);
  for (int64_t begin = 0; begin < row.vocab; begin += kRowBlock) {
    const int64_t len = std::min<int64_t>(kRowBlock, row.vocab - begin);
    bin_block(row.logits + begin, len, row.max, scale, bin);
    for (int64_t i = 0; i < len; ++i) s.bins[bin[i]] += s.weights[begin + i];
  }
  double mass = 0;
  int32_t edge = 0;
  while (edge < kBins - 1 && mass + s.bins[edge] < p * total) mass += s.bins[edge++];
  s.candidates.clear();
  for (int64_t begin = 0; begin < row.vocab; begin += kRowBlock) {
    const int64_t len = std::min<int64_t>(kRowBlock, row.vocab - begin);
    bin_block(row.logits + begin, len, row.max, scale, bin);
    for (int64_t i = 0; i < len; ++i) {
      float& w = s.weights[begin + i];
      if (bin[i] == edge) {
        s.candidates.push_back({row.logits[begin + i], static_cast<int32_t>(begin + i), w});
      }
      if (bin[i] >= edge) w = 0;
    }
  }
  std::sort(s.candidates.begin(), s.candidates.end(), row::before);
  for (const Candidate& c : s.candidates) {
    if (mass >= p * total) break;
    s.weights[c.id] = static_cast<float>(c.weight);
    mass += c.weight;
  }
}

int32_t sample_blocks(const Row& row, double u, const Scratch& s) {
  double total = 0;
  for (double sum : s.sums) total += sum;
  const double target = u * total;
  const int64_t nb = row::blocks(row.vocab);
  double mass = 0;
  int64_t b = 0, last_block = 0;
  for (; b < nb; ++b) {
    if (s.sums[b] > 0) last_block = b;
    if (mass + s.sums[b] > target) break;
    mass += s.sums[b];
  }
  if (b == nb) b = last_block;
  int32_t last = -1;
  for (int64_t i = b * kRowBlock; i < (b + 1) * kRowBlock; ++i) {
    if (s.weights[i] == 0) continue;
    mass += s.weights[i];
    last = static_cast<int32_t>(i);
    if (mass > target) break;
  }
  return last;  // rounding: the block's sum was taken in another order
}

int32_t sample_all(const Row& row, const SamplingParams& p, double u, Scratch& s) {
  const float inv_t = inverse_temperature(p.temperature);
  const double total =
      s.kernels->weigh(row.logits, row.vocab, row.max, inv_t, s.weights.data(), s.sums.data());
  if (p.top_p < 1) {
    row::select_top(row.logits, row.vocab, std::min(kFirstCandidates, row.vocab),
                    s.block_max.data(), s.selection, s.candidates);
    for (Candidate& c : s.candidates) c.weight = s.weights[c.id];
    if (cut_top_p(s.candidates, p.top_p, total)) return sample_candidates(s.candidates, row, p, u);
    drop_outside_top_p(row, p.top_p, total, inv_t, s);
  }
  if (p.min_p > 0) {
    const double floor = min_p_floor(row, p);
    for (int64_t i = 0; i < row.vocab; ++i) {
      if (row.logits[i] < floor) s.weights[i] = 0;
    }
  }
  if (p.top_p < 1 || p.min_p > 0) {
    s.kernels->sum_blocks(s.weights.data(), row::blocks(row.vocab), s.sums.data());
  }
  return sample_blocks(row, u, s);
}

// Returns log(sum(exp(x))) of a row.
double log_sum_exp(const row::RowKernels& kernels, const Row& row) {
  return row.max + std::log(kernels.exp_sum(row.logits, row.vocab, row.max));
}

// Computes log-probabilities of the raw row, whose block maxima are in s.
void fill_logprobs(SampleJob& job, const Row& raw, int k, Scratch& s) {
  const double lse = log_sum_exp(*s.kernels, raw);
  job.logprobs.logprob = static_cast<float>(raw.logits[job.token] - lse);
  job.logprobs.top.clear();
  if (k == 0) return;
  row::select_top(raw.logits, raw.vocab, k, s.block_max.data(), s.selection, s.candidates);
  std::sort(s.candidates.begin(), s.candidates.end(), row::before);
  job.logprobs.top.reserve(k);
  for (const Candidate& c : s.candidates) {
    job.logprobs.top.emplace_back(c.id, static_cast<float>(c.logit - lse));
  }
}

int32_t pick(const Row& row, const SamplerState::Impl& state, int64_t position, Scratch& s) {
  const SamplingParams& p = *state.params;
  if (p.temperature == 0 || p.top_k == 1) {
    return row::find_max(row.logits, row.vocab, row.max, s.block_max.data());
  }
  const double u = philox_uniform(p.seed, p.attempt, static_cast<uint32_t>(state.choice),
                                  static_cast<uint64_t>(position));
  if (p.top_k > 0 && p.top_k < row.vocab) return sample_top_k(row, p, u, s);
  return sample_all(row, p, u, s);
}

void sample_one(SampleJob& job, int64_t vocab, Scratch& s) {
  const SamplerState::Impl& state = job.state->impl();
  job.token = -1;
  const row::Scan raw = s.kernels->scan(job.logits, vocab, s.block_max.data());
  job.finite = !raw.nan && std::isfinite(raw.max);
  if (!job.finite) return;
  const bool edits = state.edits();
  Row row{job.logits, vocab, raw.max};
  if (edits) {
    s.logits.assign(job.logits, job.logits + vocab);
    state.apply(s.logits.data(), static_cast<int>(vocab));
    row = {s.logits.data(), vocab, s.kernels->scan(s.logits.data(), vocab, s.block_max.data()).max};
    job.finite = std::isfinite(row.max);
    if (!job.finite) return;
  }
  job.token = pick(row, state, job.position, s);
  if (state.params->logprobs < 0) return;
  if (edits) s.kernels->scan(job.logits, vocab, s.block_max.data());
  fill_logprobs(job, {job.logits, vocab, raw.max}, state.params->logprobs, s);
}

}  // namespace

struct Sampler::Impl {
  Context& ctx;
  int64_t vocab;
  const row::RowKernels& kernels;
  std::vector<Scratch> scratch;  // by worker
};

Sampler::Sampler(Context& ctx, int vocab)
    : impl_(new Impl{ctx, vocab, row_kernels(ctx.isa), std::vector<Scratch>(ctx.pool.size())}) {}
Sampler::~Sampler() = default;

void Sampler::sample(SampleJob* jobs, int64_t n) {
  const ProfileScope scope(impl_->ctx.profiler, Op::sample,
                           static_cast<double>(n * impl_->vocab) * sizeof(float), 0);
  impl_->ctx.pool.parallel_for(n, 1, [&](int64_t begin, int64_t end, int worker) {
    Scratch& s = impl_->scratch[worker];
    s.prepare(impl_->kernels, impl_->vocab);
    for (int64_t i = begin; i < end; ++i)
      if (!jobs[i].done) sample_one(jobs[i], impl_->vocab, s);
  });
}

float Sampler::logprob_of(const float* logits, int32_t token) const {
  const row::Scan scan = impl_->kernels.scan(logits, impl_->vocab, nullptr);
  if (scan.nan || !std::isfinite(scan.max)) return std::numeric_limits<float>::quiet_NaN();
  const double lse = log_sum_exp(impl_->kernels, {logits, impl_->vocab, scan.max});
  return static_cast<float>(logits[token] - lse);
}

}  // namespace turbomind
