// Ids and options of handles. A handle is a sequence that outlives its requests (SGLang: session).
#pragma once

#include <cstdint>
#include <string>

namespace turbomind {

using HandleId = uint64_t;  // never 0, never reused

struct HandleOptions {
  std::string salt;              // as RequestOptions::salt
  int adapter = 0;               // 0: none
  float retention_priority = 0;  // as RequestOptions::retention_priority
  bool persist = false;          // its pages are copied to the lower tiers
};

}  // namespace turbomind
