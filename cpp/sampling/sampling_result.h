// Results of sampling that a request reports beside its tokens.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace turbomind {

// Why a choice ended; none: it goes on.
enum class FinishReason : uint8_t { none, stop, length, cancelled, error };

// Log-probabilities at one position.
struct TokenLogprobs {
  float logprob =
      0;  // of the token: log-softmax of the raw logits, before penalties and temperature
  std::vector<std::pair<int32_t, float>> top;  // most likely first; ties by lower id
};

}  // namespace turbomind
