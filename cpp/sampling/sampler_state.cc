#include "sampling/sampler_state.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

#include "core/philox.h"

#include "core/error.h"

namespace turbomind {
namespace {

constexpr int kMaxLogprobs = kMostTopTokens;  // the most that a device returns

template <typename T>
void check(bool ok, const char* name, const T& value, const char* expected) {
  if (ok) return;
  throw_error(ErrorCode::invalid_request, name, ": got ", value, ", expected ", expected);
}

void check_token(const char* name, size_t index, int32_t id, int vocab) {
  if (id >= 0 && id < vocab) return;
  throw_error(ErrorCode::invalid_request, name, "[", index, "]: got token id ", id,
              ", expected 0 to ", vocab - 1);
}

void check_lists(const SamplingParams& p, int vocab) {
  for (size_t i = 0; i < p.logit_bias.size(); ++i) {
    check_token("logit_bias", i, p.logit_bias[i].first, vocab);
    const float bias = p.logit_bias[i].second;
    if (std::isnan(bias) || bias == std::numeric_limits<float>::infinity()) {
      throw_error(ErrorCode::invalid_request, "logit_bias[", i, "]: got ", bias,
                  ", expected a finite number or -inf");
    }
  }
  for (size_t i = 0; i < p.bad_words.size(); ++i) {
    if (p.bad_words[i].empty()) {
      throw_error(ErrorCode::invalid_request, "bad_words[", i,
                  "]: got an empty sequence, expected at least one token id");
    }
    for (int32_t id : p.bad_words[i]) check_token("bad_words", i, id, vocab);
  }
  for (size_t i = 0; i < p.stop_token_ids.size(); ++i) {
    check_token("stop_token_ids", i, p.stop_token_ids[i], vocab);
  }
  for (size_t i = 0; i < p.eos_token_ids.size(); ++i) {
    check_token("eos_token_ids", i, p.eos_token_ids[i], vocab);
  }
}

// Clamps sums and quotients of huge penalties and biases to float, so that the maximum is finite;
// -inf (a ban) passes.
float bounded(float v) {
  return v > FLT_MAX ? FLT_MAX : v;
}

}  // namespace

void validate(const SamplingParams& p, int vocab) {
  check(p.max_new_tokens == -1 || p.max_new_tokens >= 1, "max_new_tokens", p.max_new_tokens,
        "-1 or at least 1");
  check(p.min_new_tokens >= 0, "min_new_tokens", p.min_new_tokens, "at least 0");
  check(p.max_new_tokens == -1 || p.min_new_tokens <= p.max_new_tokens, "min_new_tokens",
        p.min_new_tokens, "at most max_new_tokens");
  check(std::isfinite(p.temperature) && p.temperature >= 0, "temperature", p.temperature,
        "a finite number, at least 0");
  check(p.top_k >= 0, "top_k", p.top_k, "at least 0");
  check(p.top_p > 0 && p.top_p <= 1, "top_p", p.top_p, "above 0, at most 1");
  check(p.min_p >= 0 && p.min_p <= 1, "min_p", p.min_p, "0 to 1");
  check(std::isfinite(p.repetition_penalty) && p.repetition_penalty > 0, "repetition_penalty",
        p.repetition_penalty, "a finite number above 0");
  check(std::isfinite(p.presence_penalty), "presence_penalty", p.presence_penalty,
        "a finite number");
  check(std::isfinite(p.frequency_penalty), "frequency_penalty", p.frequency_penalty,
        "a finite number");
  check(p.continued >= 0, "continued", p.continued, "0 to the length of the prompt");
  check(p.n >= 1 && p.n <= kMaxChoices, "n", p.n, "1 to 256");
  const int most = std::min(kMaxLogprobs, vocab);
  if (p.logprobs < -1 || p.logprobs > most) {
    throw_error(ErrorCode::invalid_request, "logprobs: got ", p.logprobs, ", expected -1 to ",
                most);
  }
  check_lists(p, vocab);
}

size_t TokenCounts::place_of(int32_t id) const {
  const size_t mask = table_.size() - 1;
  size_t s = (static_cast<uint32_t>(id) * 0x9E3779B1u >> 7) & mask;
  while (table_[s] >= 0 && entries_[table_[s]].id != id) s = (s + 1) & mask;
  return s;
}

void TokenCounts::grow() {
  table_.assign(std::max<size_t>(64, table_.size() * 2), -1);
  for (size_t i = 0; i < entries_.size(); ++i) {
    table_[place_of(entries_[i].id)] = static_cast<int32_t>(i);
  }
}

TokenCounts::Entry& TokenCounts::at(int32_t id) {
  if (entries_.size() * 2 >= table_.size()) grow();
  const size_t s = place_of(id);
  if (table_[s] < 0) {
    table_[s] = static_cast<int32_t>(entries_.size());
    entries_.push_back({id, 0});
  }
  return entries_[table_[s]];
}

bool SamplerState::Impl::edits() const {
  return repetition || output_penalty || !params->logit_bias.empty() ||
         !params->bad_words.empty() || (produced < params->min_new_tokens && !stops.empty());
}

void SamplerState::Impl::apply_penalties(float* logits, int vocab) const {
  const float repeat = params->repetition_penalty;
  for (const TokenCounts::Entry& e : counts.entries()) {
    if (e.id < 0 || e.id >= vocab) continue;  // inputs that are not tokens have no logit
    float v = logits[e.id];
    if (repetition) v = v < 0 ? v * repeat : v / repeat;
    if (e.produced > 0) {
      v -= params->presence_penalty + params->frequency_penalty * static_cast<float>(e.produced);
    }
    // A penalty never bans: -inf stays reserved for bans.
    logits[e.id] = logits[e.id] == -INFINITY ? -INFINITY : std::max(bounded(v), -FLT_MAX);
  }
}

void SamplerState::Impl::apply_bad_words(float* logits, int vocab) const {
  for (const std::vector<int32_t>& word : params->bad_words) {
    const size_t past = word.size() - 1;
    if (past > tail.size() || word.back() >= vocab) continue;
    if (std::equal(word.begin(), word.end() - 1, tail.end() - past))
      logits[word.back()] = -INFINITY;
  }
}

void SamplerState::Impl::apply(float* logits, int vocab) const {
  apply_penalties(logits, vocab);
  for (const auto& [id, bias] : params->logit_bias) logits[id] = bounded(logits[id] + bias);
  apply_bad_words(logits, vocab);
  if (produced < params->min_new_tokens) {
    for (int32_t id : stops) logits[id] = -INFINITY;
  }
}

void SamplerState::Impl::push_tail(int32_t token) {
  if (tail_size == 0) return;
  if (tail.size() == tail_size) tail.erase(tail.begin());
  tail.push_back(token);
}

SamplerState::SamplerState(std::shared_ptr<const SamplingParams> params, int choice,
                           const int32_t* prompt, int64_t prompt_len)
    : impl_(std::make_unique<Impl>()) {
  Impl& s = *impl_;
  s.params = std::move(params);
  s.choice = choice;
  const SamplingParams& p = *s.params;
  s.repetition = p.repetition_penalty != 1.0f;
  s.output_penalty = p.presence_penalty != 0.0f || p.frequency_penalty != 0.0f;
  s.stops = p.stop_token_ids;
  if (!p.ignore_eos) s.stops.insert(s.stops.end(), p.eos_token_ids.begin(), p.eos_token_ids.end());
  std::sort(s.stops.begin(), s.stops.end());
  for (const auto& word : p.bad_words) s.tail_size = std::max(s.tail_size, word.size() - 1);
  s.tail.reserve(s.tail_size);
  const int64_t look_back = std::min<int64_t>(prompt_len, static_cast<int64_t>(s.tail_size));
  s.tail.assign(prompt + (prompt_len - look_back), prompt + prompt_len);
  const int64_t output = prompt_len - p.continued;  // [output, prompt_len) count as produced
  for (int64_t i = s.repetition ? 0 : output; i < prompt_len; ++i) {
    if (s.repetition || s.output_penalty) s.counts.at(prompt[i]).produced += i >= output;
  }
}

void SamplerState::accept(int32_t token) {
  impl_->produced += 1;
  if (impl_->repetition || impl_->output_penalty) impl_->counts.at(token).produced += 1;
  impl_->push_tail(token);
}

void SamplerState::set_choice(int choice) {
  impl_->choice = choice;
}
const SamplingParams& SamplerState::params() const {
  return *impl_->params;
}
int SamplerState::choice() const {
  return impl_->choice;
}
int64_t SamplerState::produced() const {
  return impl_->produced;
}

FinishReason SamplerState::finish_of(int32_t token) const {
  if (impl_->produced < impl_->params->min_new_tokens) return FinishReason::none;
  const bool stop = std::binary_search(impl_->stops.begin(), impl_->stops.end(), token);
  return stop ? FinishReason::stop : FinishReason::none;
}

bool SamplerState::device_samples() const {
  return !impl_->edits();
}

SampleRow SamplerState::device_row(const SampleJob& job, int32_t out) const {
  const SamplingParams& p = *impl_->params;
  SampleRow row;
  row.logits_row = static_cast<int32_t>(job.row);
  row.out = out;
  row.top_k = p.top_k;
  row.temperature = p.temperature;
  row.top_p = p.top_p;
  row.min_p = p.min_p;
  const double u = philox_uniform(p.seed, p.attempt, static_cast<uint32_t>(impl_->choice),
                                  static_cast<uint64_t>(job.position));
  row.uniform = static_cast<uint64_t>(u * 0x1p53);  // exact: it has 53 bits
  return row;
}

SamplerState::SamplerState(const SamplerState& o) : impl_(std::make_unique<Impl>(*o.impl_)) {}
SamplerState::SamplerState(SamplerState&&) noexcept = default;
SamplerState& SamplerState::operator=(SamplerState&&) noexcept = default;
SamplerState::~SamplerState() = default;

}  // namespace turbomind
