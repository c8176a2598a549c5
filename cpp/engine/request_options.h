// Kind and options of one request, apart from sampling (sampling/sampling_params.h).
#pragma once

#include <cstdint>
#include <string>

namespace turbomind {

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
