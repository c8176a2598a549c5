// From a row of logits to a token. Runs on the engine thread and its pool; no allocation per step
// once a sequence's state exists.
#pragma once

#include <cstdint>
#include <memory>

#include "core/context.h"
#include "ops/logprobs_cuda.h"
#include "ops/sample_cuda.h"
#include "sampling/sampling_params.h"
#include "sampling/sampling_result.h"

namespace turbomind {

constexpr int kMaxChoices = 256;  // of a request

// Throws Error(invalid_request) naming the first parameter that is out of range (token ids against
// `vocab` included), the value seen and the range.
void validate(const SamplingParams& params, int vocab);

struct SampleJob;

// What sampling remembers of one choice of one request: token counts for penalties, matchers for
// bad words. Copyable, so a fork of choices after the shared prompt is a copy.
class SamplerState {
 public:
  // params->continued is at most prompt_len.
  SamplerState(std::shared_ptr<const SamplingParams> params, int choice, const int32_t* prompt,
               int64_t prompt_len);
  void accept(int32_t token);   // a produced token, committed
  void set_choice(int choice);  // after copying, before the first sample
  const SamplingParams& params() const;
  int choice() const;
  int64_t produced() const;                     // accepted tokens so far
  FinishReason finish_of(int32_t token) const;  // stop for eos/stop ids once min_new_tokens is met
  // Whether the row is drawn from as it is, by temperature, top-k, top-p and min-p alone: a device
  // can do that, and tell log-probabilities.
  bool device_samples() const;
  SampleRow device_row(const SampleJob& job, int32_t out) const;
  struct Impl;
  Impl& impl() { return *impl_; }
  SamplerState(const SamplerState&);
  SamplerState(SamplerState&&) noexcept;
  SamplerState& operator=(SamplerState&&) noexcept;
  ~SamplerState();

 private:
  std::unique_ptr<Impl> impl_;
};

struct SampleJob {
  const float* logits = nullptr;  // [vocab], not changed
  SamplerState* state = nullptr;
  int64_t position = 0;      // index of the new token in the sequence; keys Philox with
                             // (seed, attempt, choice, position)
  int32_t token = -1;        // out
  bool finite = true;        // out: false when the row has a NaN or +inf, or no finite logit, or
                             // every token is banned; `token` is then -1
  TokenLogprobs logprobs{};  // out, when params.logprobs >= 0
  int64_t row = 0;           // of the step's sampled rows, where the model keeps them
  bool done = false;         // a device drew the token: nothing is left to do
};

class Sampler {
 public:
  Sampler(Context& ctx, int vocab);
  ~Sampler();
  void sample(SampleJob* jobs, int64_t n);  // one job per row, spread over the pool

  // log-softmax(logits)[token]; for scoring. NaN when the row is not finite.
  float logprob_of(const float* logits, int32_t token) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
