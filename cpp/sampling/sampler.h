// Samples tokens from rows of logits on the CPU, and describes rows that a device samples itself.
// The arithmetic of the device is in ops/; parameters are in sampling_params.h. No allocation per
// step once the state of a sequence exists.
#pragma once

#include <cstdint>
#include <memory>

#include "core/context.h"
#include "ops/logprobs_cuda.h"
#include "ops/sample_cuda.h"
#include "sampling/sampling_params.h"
#include "sampling/sampling_result.h"

namespace turbomind {

// Throws Error(invalid_request) naming the first parameter that is out of range (token ids against
// `vocab` included), the value seen and the range.
void validate(const SamplingParams& params, int vocab);

struct SampleJob;

// State of sampling for one choice of a request: token counts for penalties, the last tokens for
// bad words. Copyable: choices that fork after the shared prompt begin with copies. Engine thread.
class SamplerState {
 public:
  // `prompt` [prompt_len] is read at once. params->continued is at most prompt_len.
  SamplerState(std::shared_ptr<const SamplingParams> params, int choice, const int32_t* prompt,
               int64_t prompt_len);
  // Adds a token that was appended to the sequence.
  void accept(int32_t token);
  // Sets the choice of a copy, before its first sample.
  void set_choice(int choice);
  const SamplingParams& params() const;
  int choice() const;
  // Returns the number of accepted tokens.
  int64_t produced() const;
  // Returns stop for end-of-sequence and stop ids once min_new_tokens is met, else none.
  FinishReason finish_of(int32_t token) const;
  // Returns whether no processor edits the row, so that temperature, top-k, top-p and min-p
  // suffice: a device can do that, log-probabilities included.
  bool device_samples() const;
  // Returns the device's job for `job`, whose token goes to index `out`.
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

// One token to sample. Inputs first; outputs are marked.
struct SampleJob {
  const float* logits = nullptr;  // [vocab] float32, not changed
  SamplerState* state = nullptr;
  int64_t position = 0;      // index of the new token in the sequence; keys Philox with
                             // (seed, attempt, choice, position)
  int32_t token = -1;        // out
  bool finite = true;        // out: false when the row has a NaN or +inf, or no finite logit, or
                             // every token is banned; `token` is then -1
  TokenLogprobs logprobs{};  // out, when params.logprobs >= 0
  int64_t row = 0;           // of the step's sampled rows, when the model has them
  bool done = false;         // the device has sampled the token
};

// Samples on the CPU. One thread at a time.
class Sampler {
 public:
  Sampler(Context& ctx, int vocab);
  ~Sampler();
  // Samples a token for each of `jobs` [n] that is not done, spread over the thread pool.
  void sample(SampleJob* jobs, int64_t n);
  // Returns log-softmax(logits)[token] of one row [vocab]; NaN when the row is not finite.
  float logprob_of(const float* logits, int32_t token) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
