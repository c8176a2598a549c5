// The sampler against naive references in double precision, its distributions and its determinism.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "core/error.h"
#include "core/philox.h"
#include "cpu/isa_dispatch.h"
#include "sampling/row_kernels.h"
#include "sampling/sampler.h"
#include "tests/check.h"

namespace turbomind {

TM_KERNEL_TABLE(row::RowKernels, row_kernels)

namespace {

// Own generator for inputs: SplitMix64.
struct Rng {
  uint64_t s;
  uint64_t next() {
    uint64_t z = (s += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  double normal() {
    return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform());
  }
};

// Applies every processor by its definition, over the whole history.
std::vector<double> reference_logits(const std::vector<float>& raw, const SamplingParams& p,
                                     const std::vector<int32_t>& prompt,
                                     const std::vector<int32_t>& produced) {
  std::vector<double> l(raw.begin(), raw.end());
  std::vector<int32_t> all = prompt;
  all.insert(all.end(), produced.begin(), produced.end());
  for (int32_t id : std::set<int32_t>(all.begin(), all.end())) {
    l[id] = l[id] < 0 ? l[id] * p.repetition_penalty : l[id] / p.repetition_penalty;
  }
  for (int32_t id : std::set<int32_t>(produced.begin(), produced.end())) {
    l[id] -= p.presence_penalty;
    l[id] -=
        static_cast<double>(p.frequency_penalty) * std::count(produced.begin(), produced.end(), id);
  }
  for (const auto& [id, bias] : p.logit_bias) l[id] += bias;
  for (const auto& word : p.bad_words) {
    if (word.size() - 1 > all.size()) continue;
    if (std::equal(word.begin(), word.end() - 1, all.end() - (word.size() - 1))) {
      l[word.back()] = -INFINITY;
    }
  }
  if (static_cast<int64_t>(produced.size()) < p.min_new_tokens) {
    for (int32_t id : p.stop_token_ids) l[id] = -INFINITY;
    if (!p.ignore_eos) {
      for (int32_t id : p.eos_token_ids) l[id] = -INFINITY;
    }
  }
  return l;
}

// Returns probabilities after temperature, top-k, top-p and min-p. `slack` is set to the least
// distance of a decision from its threshold, for rounding.
std::vector<double> reference_probs(const std::vector<double>& l, const SamplingParams& p,
                                    double* slack) {
  const size_t n = l.size();
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return l[a] > l[b]; });
  const double max = l[order[0]];
  std::vector<double> w(n, 0);
  if (p.temperature == 0) {
    w[order[0]] = 1;
    *slack = n > 1 ? max - l[order[1]] : 1;
    return w;
  }
  size_t chosen = p.top_k > 0 ? std::min<size_t>(p.top_k, n) : n;
  if (chosen < n) *slack = std::min(*slack, l[order[chosen - 1]] - l[order[chosen]]);
  double total = 0;
  for (size_t i = 0; i < chosen; ++i) {
    w[order[i]] = std::exp((l[order[i]] - max) / p.temperature);
    total += w[order[i]];
  }
  if (p.top_p < 1) {
    double mass = 0;
    size_t i = 0;
    while (i < chosen) {
      mass += w[order[i++]] / total;
      *slack = std::min(*slack, std::abs(mass - p.top_p));
      if (mass >= p.top_p) break;
    }
    for (size_t j = i; j < chosen; ++j) w[order[j]] = 0;
  }
  for (double& v : w) {
    if (p.min_p > 0 && v > 0) *slack = std::min(*slack, std::abs(v - p.min_p) + (v == 1));
    if (v < p.min_p) v = 0;
  }
  total = std::accumulate(w.begin(), w.end(), 0.0);
  for (double& v : w) v /= total;
  return w;
}

int32_t reference_sample(const std::vector<double>& probs, double u, double* slack) {
  double mass = 0;
  int32_t token = -1;
  for (size_t i = 0; i < probs.size(); ++i) {
    if (probs[i] == 0) continue;
    mass += probs[i];
    *slack = std::min(*slack, std::abs(mass - u));
    if (token < 0 && mass > u) token = static_cast<int32_t>(i);
  }
  return token;
}

struct Machine {
  Profiler profiler;
  ThreadPool pool;
  Context ctx;
  explicit Machine(int threads, Isa isa = Isa::portable)
      : pool(threads), ctx{pool, isa, profiler} {}
};

std::vector<int32_t> random_ids(Rng& rng, int64_t count, int vocab) {
  std::vector<int32_t> ids(count);
  for (auto& id : ids) id = static_cast<int32_t>(rng.below(vocab));
  return ids;
}

SamplingParams random_params(Rng& rng, int vocab) {
  SamplingParams p;
  const auto maybe = [&](double chance) { return rng.uniform() < chance; };
  p.seed = rng.next();
  p.attempt = static_cast<uint32_t>(rng.below(3));
  const float temperatures[] = {0.0f, 0.3f, 1.0f, 1.7f};
  p.temperature = temperatures[rng.below(4)];
  if (maybe(0.4)) p.top_k = static_cast<int>(1 + rng.below(std::min(vocab * 2, 3000)));
  const float nuclei[] = {0.05f, 0.5f, 0.9f, 0.999f};
  if (maybe(0.5)) p.top_p = nuclei[rng.below(4)];
  if (maybe(0.3)) p.min_p = static_cast<float>(rng.uniform() * rng.uniform());
  if (maybe(0.3)) p.repetition_penalty = static_cast<float>(0.7 + rng.uniform());
  if (maybe(0.3)) p.presence_penalty = static_cast<float>(rng.normal());
  if (maybe(0.3)) p.frequency_penalty = static_cast<float>(rng.normal());
  if (maybe(0.3)) {
    for (int32_t id : random_ids(rng, 3, vocab))
      p.logit_bias.push_back({id, float(3 * rng.normal())});
  }
  if (maybe(0.3) && vocab > 8) {
    for (int i = 0; i < 3; ++i) p.bad_words.push_back(random_ids(rng, 1 + rng.below(2), vocab));
  }
  if (maybe(0.3) && vocab > 8) {
    p.min_new_tokens = rng.below(6);
    p.eos_token_ids = random_ids(rng, 2, vocab);
    p.stop_token_ids = random_ids(rng, 2, vocab);
    p.ignore_eos = maybe(0.3);
  }
  p.logprobs = maybe(0.4) ? static_cast<int>(rng.below(std::min(vocab, 8) + 1)) : -1;
  return p;
}

void check_logprobs(const std::vector<float>& raw, int k, const SampleJob& job,
                    const Sampler& sampler) {
  const double max = *std::max_element(raw.begin(), raw.end());
  double sum = 0;
  for (float v : raw) sum += std::exp(v - max);
  const double lse = max + std::log(sum);
  CHECK(std::abs(job.logprobs.logprob - (raw[job.token] - lse)) < 2e-6 * (1 + std::abs(lse)), "%g",
        job.logprobs.logprob);
  CHECK(sampler.logprob_of(raw.data(), job.token) == job.logprobs.logprob, "token %d", job.token);
  std::vector<int32_t> order(raw.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return raw[a] > raw[b]; });
  CHECK(job.logprobs.top.size() == static_cast<size_t>(k), "%zu", job.logprobs.top.size());
  for (int i = 0; i < k; ++i) {
    CHECK(job.logprobs.top[i].first == order[i], "rank %d", i);
    CHECK(std::abs(job.logprobs.top[i].second - (raw[order[i]] - lse)) < 2e-6 * (1 + std::abs(lse)),
          "rank %d", i);
  }
}

// Random rows, histories and parameters: the same token as the reference unless rounding decides.
void check_against_reference(Isa isa) {
  Machine machine(2, isa);
  Rng rng{1};
  int compared = 0, too_close = 0;
  for (int vocab : {1, 2, 63, 64, 65, 200, 1000, 5000, 50257}) {
    Sampler sampler(machine.ctx, vocab);
    const int rounds = vocab > 10000 ? 60 : vocab > 2000 ? 250 : 1000;
    for (int round = 0; round < rounds; ++round) {
      const double spread = rng.uniform() < 0.5 ? 1.0 : 6.0;
      std::vector<float> raw(vocab);
      for (float& v : raw) v = static_cast<float>(spread * rng.normal());
      if (rng.uniform() < 0.2) {  // few distinct values: ties everywhere
        for (float& v : raw) v = std::round(v);
      }
      const SamplingParams p = random_params(rng, vocab);
      validate(p, vocab);
      const std::vector<int32_t> prompt = random_ids(rng, rng.below(20), std::min(vocab, 30));
      const std::vector<int32_t> produced = random_ids(rng, rng.below(10), std::min(vocab, 30));
      const int choice = static_cast<int>(rng.below(4));
      const int64_t position = rng.below(int64_t{1} << 40);
      SamplerState state(std::make_shared<SamplingParams>(p), 0, prompt.data(), prompt.size());
      for (int32_t id : produced) state.accept(id);
      SamplerState copy(state);
      copy.set_choice(choice);
      state.accept(0);  // must not reach the copy
      SampleJob job{raw.data(), &copy, position};
      sampler.sample(&job, 1);
      const std::vector<double> logits = reference_logits(raw, p, prompt, produced);
      if (*std::max_element(logits.begin(), logits.end()) == -INFINITY) {
        CHECK(!job.finite && job.token == -1, "every token is banned");
        continue;
      }
      double slack = 1;
      const std::vector<double> probs = reference_probs(logits, p, &slack);
      // Ties of raw values are decided by id on both sides; edited ones are rounded differently.
      const bool exact_ties = p.repetition_penalty == 1 && p.presence_penalty == 0 &&
                              p.frequency_penalty == 0 && p.logit_bias.empty();
      if (slack == 0 && exact_ties) slack = 1;
      const double u = philox_uniform(p.seed, p.attempt, choice, position);
      const int32_t expected = reference_sample(probs, u, &slack);
      CHECK(job.finite && job.token >= 0 && job.token < vocab, "vocab %d round %d", vocab, round);
      if (p.temperature > 0 && slack < 2e-6) {
        ++too_close;
      } else if (p.temperature == 0 && slack < 1e-5 && !exact_ties) {
        ++too_close;
      } else {
        ++compared;
        CHECK(job.token == expected,
              "vocab %d round %d: got %d, reference %d (T %g k %d p %g min %g)", vocab, round,
              job.token, expected, p.temperature, p.top_k, p.top_p, p.min_p);
      }
      if (p.logprobs >= 0) check_logprobs(raw, p.logprobs, job, sampler);
    }
  }
  CHECK(too_close * 10 < compared, "%d of %d were too close to call", too_close, compared);
  std::printf("reference: %s: %d rows equal, %d too close to call\n", isa_name(isa), compared,
              too_close);
}

void test_against_reference() {
  for (Isa isa : {Isa::portable, best_isa()}) check_against_reference(isa);
}

std::vector<Isa> isas() {
  std::vector<Isa> all = available_isas();
  if (isa_available(Isa::amx_emulated)) all.push_back(Isa::amx_emulated);
  return all;
}

// The definition of a weight, one element at a time: each operation is rounded by itself.
float reference_exp(float x) {
  const float c = std::max(x, -87.0f), t = c * 1.44269504f + 12582912.0f, k = t - 12582912.0f;
  const float r = (c - k * 0.693359375f) + k * 2.12194440e-4f;
  float p = r * 1.3888889e-3f + 8.3333333e-3f;
  for (float a : {4.1666667e-2f, 1.6666667e-1f, 0.5f, 1.0f, 1.0f}) p = p * r + a;
  return x <= -87.0f ? 0.0f : std::ldexp(p, static_cast<int>(k));
}

// Weights and the sums of their blocks have the bits of the definition on every instruction set,
// so that a seed gives the same tokens on all of them; maxima and NaNs are found everywhere.
void test_row_kernels() {
  Rng rng{4};
  for (const int n : {1, 15, 64, 65, 100, 200, 100000}) {
    std::vector<float> x(n), weights(row::blocks(n) * row::kRowBlock);
    std::vector<double> sums(row::blocks(n));
    for (float& v : x) v = static_cast<float>(10 * rng.normal() - 90 * rng.uniform());
    if (n > 10) x[7] = -INFINITY, x[8] = -0.0f, x[9] = 0.0f;
    const float max = *std::max_element(x.begin(), x.end());
    for (const float scale : {1.0f, 0.7f, 1e30f}) {
      std::vector<float> want(weights.size());
      for (int i = 0; i < n; ++i) want[i] = reference_exp((x[i] - max) * scale);
      for (const Isa isa : isas()) {
        const row::RowKernels& kernels = row_kernels(isa);
        const double total = kernels.weigh(x.data(), n, max, scale, weights.data(), sums.data());
        CHECK(weights == want, "%s: weights of %d", isa_name(isa), n);
        double all = 0;
        for (size_t b = 0; b < sums.size(); ++b) {
          double lane[8] = {};
          for (int i = 0; i < row::kRowBlock; ++i) lane[i % 8] += want[b * row::kRowBlock + i];
          const double sum = ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
                             ((lane[2] + lane[6]) + (lane[3] + lane[7]));
          CHECK(sums[b] == sum, "%s: sum of block %zu of %d", isa_name(isa), b, n);
          all += sum;
        }
        CHECK(total == all, "%s: sum of %d", isa_name(isa), n);
        std::vector<double> again(sums.size());
        kernels.sum_blocks(weights.data(), row::blocks(n), again.data());
        CHECK(again == sums, "%s: sums of blocks", isa_name(isa));
        if (scale == 1) CHECK(kernels.exp_sum(x.data(), n, max) == all, "%s", isa_name(isa));
      }
    }
    for (const Isa isa : isas()) {
      std::vector<float> tops(row::blocks(n));
      const row::Scan scan = row_kernels(isa).scan(x.data(), n, tops.data());
      CHECK(scan.max == max && !scan.nan, "%s: maximum of %d", isa_name(isa), n);
      for (int b = 0; b < row::blocks(n); ++b) {
        const auto begin = x.begin() + b * row::kRowBlock;
        const auto end = x.begin() + std::min(n, (b + 1) * row::kRowBlock);
        CHECK(tops[b] == *std::max_element(begin, end), "%s: block %d of %d", isa_name(isa), b, n);
      }
      for (const int at : {0, n / 2, n - 1}) {
        std::vector<float> bad = x;
        bad[at] = NAN;
        CHECK(row_kernels(isa).scan(bad.data(), n, nullptr).nan, "%s: %d of %d", isa_name(isa), at,
              n);
      }
    }
  }
}

// Samples at many positions follow the reference's probabilities: Pearson's chi-square against its
// mean + 5 standard deviations. Seeds are fixed, so the result is deterministic.
void test_distribution() {
  Machine machine(2);
  constexpr int kVocab = 100;
  constexpr int kSamples = 40000;
  Rng rng{2};
  std::vector<float> raw(kVocab);
  for (float& v : raw) v = static_cast<float>(1.5 * rng.normal());
  Sampler sampler(machine.ctx, kVocab);
  for (int variant = 0; variant < 5; ++variant) {
    SamplingParams p;
    p.seed = 77 + variant;
    if (variant == 1) p.temperature = 0.6f;
    if (variant == 2) p.top_k = 10;
    if (variant == 3) p.top_p = 0.8f;
    if (variant == 4) p.min_p = 0.1f;
    double slack = 1;
    const std::vector<double> probs = reference_probs({raw.begin(), raw.end()}, p, &slack);
    SamplerState state(std::make_shared<SamplingParams>(p), 0, nullptr, 0);
    std::vector<int> hits(kVocab);
    for (int i = 0; i < kSamples; ++i) {
      SampleJob job{raw.data(), &state, i};
      sampler.sample(&job, 1);
      ++hits[job.token];
    }
    double chi2 = 0, rest_p = 0, rest = 0;
    int cells = 0;
    for (int i = 0; i < kVocab; ++i) {
      CHECK(probs[i] > 0 || hits[i] == 0, "variant %d sampled the excluded token %d", variant, i);
      if (probs[i] * kSamples < 8) {
        rest_p += probs[i];
        rest += hits[i];
        continue;
      }
      chi2 += std::pow(hits[i] - probs[i] * kSamples, 2) / (probs[i] * kSamples);
      ++cells;
    }
    if (rest_p * kSamples >= 8) {
      chi2 += std::pow(rest - rest_p * kSamples, 2) / (rest_p * kSamples);
      ++cells;
    }
    const double limit = (cells - 1) + 5 * std::sqrt(2.0 * (cells - 1));
    CHECK(chi2 < limit, "variant %d: chi-square %g over %d cells, limit %g", variant, chi2, cells,
          limit);
  }
}

// The same tokens on every instruction set, for 1, 2 and 4 threads, alone or with other rows.
void test_determinism() {
  constexpr int kVocab = 3001;
  constexpr int kRows = 16;
  Rng rng{3};
  std::vector<float> raw(kVocab * kRows);
  for (float& v : raw) v = static_cast<float>(2 * rng.normal());
  std::vector<SamplingParams> params;
  for (int r = 0; r < kRows; ++r) params.push_back(random_params(rng, kVocab));
  std::vector<int32_t> first;
  std::vector<std::pair<int, Isa>> machines = {{2, Isa::portable}, {4, Isa::portable}};
  for (Isa isa : isas()) machines.push_back({1, isa});
  for (const auto& [threads, isa] : machines) {
    Machine machine(threads, isa);
    Sampler sampler(machine.ctx, kVocab);
    for (bool alone : {false, true}) {
      std::vector<SamplerState> states;
      std::vector<SampleJob> jobs;
      states.reserve(kRows);
      for (int r = 0; r < kRows; ++r) {
        states.emplace_back(std::make_shared<SamplingParams>(params[r]), r, nullptr, 0);
      }
      for (int r = 0; r < kRows; ++r)
        jobs.push_back({raw.data() + r * kVocab, &states[r], 100 + r});
      std::vector<int32_t> tokens;
      for (int step = 0; step < 20; ++step) {
        if (alone) {
          for (SampleJob& job : jobs) sampler.sample(&job, 1);
        } else {
          sampler.sample(jobs.data(), kRows);
        }
        for (SampleJob& job : jobs) {
          tokens.push_back(job.token);
          job.state->accept(job.token);
          ++job.position;
        }
      }
      if (first.empty()) first = tokens;
      CHECK(tokens == first, "%s, %d threads, alone %d", isa_name(isa), threads, alone);
    }
  }
}

void test_philox() {
  // Known answers published with the authors' Random123 library.
  const auto same = [](PhiloxCounter c, PhiloxKey k, PhiloxCounter want) {
    return philox4x32_10(c, k) == want;
  };
  CHECK(same({0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}), "zeros");
  CHECK(same({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}),
        "ones");
  CHECK(same({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0},
             {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}),
        "digits of pi");
  std::set<double> values;
  for (uint32_t a = 0; a < 4; ++a) {
    for (uint32_t c = 0; c < 4; ++c) {
      for (uint64_t pos : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, uint64_t{1} << 33}) {
        for (uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32}) {
          const double u = philox_uniform(seed, a, c, pos);
          CHECK(u >= 0 && u < 1, "%g", u);
          values.insert(u);
        }
      }
    }
  }
  CHECK(values.size() == 4 * 4 * 4 * 3, "each part of the key matters: %zu values", values.size());
}

void test_bad_rows() {
  Machine machine(2);
  constexpr int kVocab = 130;
  Sampler sampler(machine.ctx, kVocab);
  const float inf = std::numeric_limits<float>::infinity();
  for (float bad : {std::nanf(""), inf}) {
    for (int at : {0, 64, 127, 128, 129}) {
      std::vector<float> raw(kVocab, 0.5f), good(kVocab, 0.0f);
      raw[at] = bad;
      good[7] = 1;
      SamplingParams p;
      p.temperature = 0;
      p.logprobs = 2;
      SamplerState state(std::make_shared<SamplingParams>(p), 0, nullptr, 0);
      SampleJob jobs[2] = {{raw.data(), &state, 0}, {good.data(), &state, 0}};
      sampler.sample(jobs, 2);
      CHECK(!jobs[0].finite && jobs[0].token == -1, "%g at %d", bad, at);
      CHECK(jobs[1].finite && jobs[1].token == 7, "its neighbour");
      CHECK(std::isnan(sampler.logprob_of(raw.data(), 0)), "%g at %d", bad, at);
    }
  }
  const std::vector<float> none(kVocab, -inf);
  SamplerState state(std::make_shared<SamplingParams>(), 0, nullptr, 0);
  SampleJob job{none.data(), &state, 0};
  sampler.sample(&job, 1);
  CHECK(!job.finite, "no finite logit");
}

// Extremes that must neither overflow nor leave the vocabulary.
void test_extremes() {
  Machine machine(1);
  constexpr int kVocab = 4000;
  Sampler sampler(machine.ctx, kVocab);
  std::vector<float> raw(kVocab, -INFINITY);
  for (int i = 100; i < 3000; ++i) raw[i] = static_cast<float>(i % 7) * 1e37f;
  for (float t : {1e-38f, 1e-3f, 1.0f, 1e30f}) {
    for (float top_p : {1e-6f, 0.5f, 0.9999999f, 1.0f}) {
      for (float penalty : {1e-30f, 1.0f, 1e30f}) {
        SamplingParams p;
        p.temperature = t;
        p.top_p = top_p;
        p.repetition_penalty = penalty;
        p.logit_bias = {{500, 3e38f}, {501, -3e38f}, {502, -INFINITY}};
        const int32_t prompt[] = {100, 101, 102, 500};
        SamplerState state(std::make_shared<SamplingParams>(p), 0, prompt, 4);
        for (int i = 0; i < 20; ++i) {
          SampleJob job{raw.data(), &state, i};
          sampler.sample(&job, 1);
          CHECK(job.finite && job.token >= 100 && job.token < 3000 && job.token != 502,
                "T %g p %g penalty %g: %d", t, top_p, penalty, job.token);
        }
      }
    }
  }
}

void test_stopping() {
  SamplingParams p;
  p.eos_token_ids = {5};
  p.stop_token_ids = {9, 3};
  p.min_new_tokens = 2;
  SamplerState state(std::make_shared<SamplingParams>(p), 0, nullptr, 0);
  CHECK(state.finish_of(5) == FinishReason::none, "before min_new_tokens");
  state.accept(1);
  state.accept(1);
  CHECK(state.produced() == 2, "%d", static_cast<int>(state.produced()));
  for (int32_t id : {3, 5, 9}) CHECK(state.finish_of(id) == FinishReason::stop, "%d", id);
  CHECK(state.finish_of(4) == FinishReason::none, "no stop token");
  p.ignore_eos = true;
  SamplerState ignoring(std::make_shared<SamplingParams>(p), 0, nullptr, 0);
  ignoring.accept(1);
  ignoring.accept(1);
  CHECK(ignoring.finish_of(5) == FinishReason::none, "ignore_eos");
  CHECK(ignoring.finish_of(9) == FinishReason::stop, "stop ids are not eos ids");
}

template <typename F>
void refused(const char* name, F&& change) {
  SamplingParams p;
  validate(p, 50);
  change(p);
  try {
    validate(p, 50);
  } catch (const Error& e) {
    CHECK(e.code() == ErrorCode::invalid_request, "%s", e.what());
    CHECK(std::string(e.what()).rfind(name, 0) == 0, "%s does not begin with %s", e.what(), name);
    return;
  }
  CHECK(false, "%s was accepted", name);
}

void test_validate() {
  const float nan = std::nanf("");
  refused("max_new_tokens", [](auto& p) { p.max_new_tokens = 0; });
  refused("min_new_tokens", [](auto& p) { p.min_new_tokens = -1; });
  refused("min_new_tokens", [](auto& p) { p.max_new_tokens = 3, p.min_new_tokens = 4; });
  refused("temperature", [](auto& p) { p.temperature = -0.1f; });
  refused("temperature", [&](auto& p) { p.temperature = nan; });
  refused("top_k", [](auto& p) { p.top_k = -1; });
  refused("top_p", [](auto& p) { p.top_p = 0; });
  refused("top_p", [&](auto& p) { p.top_p = nan; });
  refused("min_p", [](auto& p) { p.min_p = 1.5f; });
  refused("repetition_penalty", [](auto& p) { p.repetition_penalty = 0; });
  refused("presence_penalty", [&](auto& p) { p.presence_penalty = nan; });
  refused("frequency_penalty", [](auto& p) { p.frequency_penalty = INFINITY; });
  refused("n:", [](auto& p) { p.n = 0; });
  refused("n:", [](auto& p) { p.n = 257; });
  refused("logprobs", [](auto& p) { p.logprobs = -2; });
  refused("logprobs", [](auto& p) { p.logprobs = 51; });
  refused("logit_bias[1]", [](auto& p) { p.logit_bias = {{0, 1.0f}, {50, 1.0f}}; });
  refused("logit_bias[0]", [&](auto& p) { p.logit_bias = {{0, nan}}; });
  refused("bad_words[0]", [](auto& p) { p.bad_words = {{}}; });
  refused("bad_words[1]", [](auto& p) { p.bad_words = {{1}, {2, -1}}; });
  refused("stop_token_ids[0]", [](auto& p) { p.stop_token_ids = {50}; });
  refused("eos_token_ids[0]", [](auto& p) { p.eos_token_ids = {-1}; });
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(test_philox),
                                  TM_CASE(test_validate),
                                  TM_CASE(test_stopping),
                                  TM_CASE(test_bad_rows),
                                  TM_CASE(test_extremes),
                                  TM_CASE(test_row_kernels),
                                  TM_CASE(test_against_reference),
                                  TM_CASE(test_distribution),
                                  TM_CASE(test_determinism),
                              });
}
