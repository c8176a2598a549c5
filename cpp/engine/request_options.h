// Kind and options of one request, apart from sampling (sampling/sampling_params.h).
#pragma once

#include <cstdint>
#include <string>

namespace turbomind {

enum class RequestKind : uint8_t {
  generate,  // samples new tokens
  score,     // log-probabilities of the prompt's own tokens
  logits,    // logits of prompt positions
};

struct RequestOptions {
  RequestKind kind = RequestKind::generate;
  // Lower is served first; ties by arrival. Request::set_priority() changes it later.
  int priority = 0;
  float retention_priority = 0;  // of its pages once unreferenced; lower ones are evicted first
  bool exact = false;            // computes again what another numerics fingerprint has computed
  std::string salt;              // the owner's: seeds block hashes, so only equal salts share pages
  int adapter = 0;               // 0: none
  int64_t first_row = 0;         // logits: the first position whose logits are wanted
};

}  // namespace turbomind
