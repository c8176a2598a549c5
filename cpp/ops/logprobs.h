// Log-probabilities of sampled tokens and of the likeliest tokens of a row: log-softmax of the
// model's own float32 logits, whatever the temperature.
//
// The GPU's kernels are ops/logprobs_cuda.h; on the CPU sampling/sampler.h computes them.
#pragma once

#include <cstdint>

namespace turbomind {

constexpr int kMostTopTokens = 256;

struct Logprob {
  int32_t token = -1;
  float logprob = 0;
};

// A request for one row, whose token has been sampled before.
struct LogprobRow {
  int32_t logits_row = 0;  // of the step's sampled rows
  int32_t sampled = 0;     // index of the row's token in the tokens that were sampled
  int32_t top = 0;         // number of likeliest tokens; at most kMostTopTokens and the vocabulary
  int32_t out =
      0;  // index of the first of its 1 + top entries: the token's own, then the likeliest
          // first, of equals the lower id. They stay unset where the token is negative.
};

}  // namespace turbomind
