// The one options struct from Python to the engine, and what a request may ask for.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace turbomind {

struct EngineOptions {
  int max_batch_size = 16;  // rows of the persistent batch
  int64_t max_context_tokens =
      0;  // 0: the model's; never more than one sequence's share of the pool
  int64_t cache_bytes = int64_t{2} << 30;
  // Above 0 overrides cache_bytes: of the device's memory that is free beside weights and steps, of
  // which a GPU keeps 256 MiB.
  double cache_share = 0;
  int64_t cache_pages = 0;   // > 0 overrides both: pages per cache group (tests)
  int prefill_chunk = 0;     // most prompt tokens of one step; 0: 512
  double step_ms = 100;      // target time of a step that ends with a token; others: four times
  bool prefix_reuse = true;  // look up sealed pages of other requests
  bool warm_up = false;      // of a GPU: see Model::warm_up

  // Tiers below the device, for the pages of handles that persist; they need prefix_reuse.
  int64_t host_bytes = 0;   // 0: no pages in the host's memory
  std::string page_folder;  // empty: no pages on disk
  int64_t disk_quota = 0;   // bytes; 0: no limit
};

// Hugging Face names. Defaults mean "off". Applied in this order: repetition, presence and
// frequency penalty, logit bias, bad words, min_new_tokens, temperature, top-k, top-p, min-p.
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
  std::vector<int32_t> stop_token_ids;          // produced, committed, then "stop"
  std::vector<int32_t> eos_token_ids;           // likewise, unless ignore_eos
  bool ignore_eos = false;
  uint64_t seed = 0;      // the effective seed; whoever has no opinion draws one outside
  uint32_t attempt = 0;   // retry raises it
  int64_t continued = 0;  // last prompt tokens that presence and frequency penalty count as output
  int n = 1;              // choices that share the prompt's pages (stateless requests only)
  int logprobs = -1;      // -1: none; k >= 0: the sampled token's and the k most likely
};

enum class RequestKind : uint8_t { generate, score, logits };

struct RequestOptions {
  RequestKind kind = RequestKind::generate;
  int priority = 0;              // lower is served first; ties by arrival
  float retention_priority = 0;  // of its pages once nothing refers to them; higher stays longer
  bool exact = false;            // computes what was made under another numerics fingerprint again
  std::string salt;  // owner's salt: seeds block hashes, so pages are shared within an owner
  int adapter = 0;
};

}  // namespace turbomind
