// Results of sampling that a request reports beside its tokens.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace turbomind {

enum class FinishReason : uint8_t { none, stop, length, cancelled, error };

struct TokenLogprobs {
  float logprob = 0;  // log-softmax of the model's own logits, before penalties and temperature
  std::vector<std::pair<int32_t, float>> top;  // most likely first; ties by lower id
};

}  // namespace turbomind
