// Ids and options of handles. A handle is a sequence that outlives its requests (SGLang: session).
#pragma once

#include <cstdint>
#include <string>

namespace turbomind {

using HandleId = uint64_t;

struct HandleOptions {
  std::string salt;
  int adapter = 0;
  float retention_priority = 0;
  bool persist = false;  // its pages are copied to the tiers below
};

}  // namespace turbomind
