// The outputs of steps that are submitted by one call and waited for by another: sampled tokens,
// log-probabilities and logits that stay with the model until they are read.
#pragma once

#include <cstdint>

#include "ops/logprobs.h"
#include "ops/sample.h"

namespace turbomind {

// The results of a model with asynchronous steps (Model::outputs()). One submit_sample() follows
// every forward(), with no rows at least. At most two steps are unread at a time: a further submit
// throws Error(internal), as does a read with nothing submitted.
class StepOutputs {
 public:
  virtual ~StepOutputs() = default;

  // Samples a token for each of `rows`, of the step that was submitted last. Does not wait.
  // rows[i].out is i.
  virtual void submit_sample(const SampleRow* rows, int64_t count) = 0;
  // Waits for the oldest unread submit_sample() and writes its tokens; -1 for a row with a NaN or
  // +inf, or without any finite logit.
  virtual void read_tokens(int32_t* tokens) = 0;

  // Computes log-probabilities of tokens of the last submit_sample(), and of the likeliest tokens.
  // rows[i].sampled is an index into the rows of that call; rows[i].out is the number of entries of
  // the rows before it.
  virtual void submit_logprobs(const LogprobRow* rows, int64_t count) = 0;
  // Waits for the oldest unread submit_logprobs() and writes all its entries.
  virtual void read_logprobs(Logprob* out) = 0;

  // Waits for the last step and writes rows [first, first + count) of its sampled rows to
  // out [count, vocab].
  virtual void read_logits(int64_t first, int64_t count, float* out) = 0;

  // Waits for everything that was submitted and discards its results and errors.
  virtual void abandon_steps() noexcept = 0;
};

}  // namespace turbomind
