// Parameters that turn a row of logits into a token, and those that end a reply.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace turbomind {

constexpr int kMaxChoices = 256;  // most choices of a request

// Names and meanings are those of Hugging Face's generation config. Defaults mean "off". Processors
// apply in this order: repetition, presence and frequency penalty, logit bias, bad words,
// min_new_tokens, temperature, top-k, top-p, min-p.
struct SamplingParams {
  int64_t max_new_tokens = -1;  // -1: to the end of the context
  int64_t min_new_tokens = 0;
  float temperature = 1.0f;  // 0: greedy
  int top_k = 0;             // 0: all
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition_penalty = 1.0f;  // over prompt and output
  float presence_penalty = 0.0f;    // over output
  float frequency_penalty = 0.0f;   // over output
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<std::vector<int32_t>> bad_words;  // token sequences never produced
  std::vector<int32_t> stop_token_ids;  // such a token is appended, then the reply ends with "stop"
  std::vector<int32_t> eos_token_ids;   // the same, unless ignore_eos
  bool ignore_eos = false;
  uint64_t seed = 0;     // Philox key, with attempt, choice and position; callers pick a random one
  uint32_t attempt = 0;  // a retry raises it, for other tokens from the same seed
  int64_t continued = 0;  // last prompt tokens that presence and frequency penalty count as output
  int n = 1;          // choices that share the prompt's pages, 1 to 256; stateless requests only
  int logprobs = -1;  // -1: none; k >= 0: those of the sampled token and of the k most likely ones
};

}  // namespace turbomind
