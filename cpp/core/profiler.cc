#include "core/profiler.h"

namespace turbomind {

const char* op_name(Op op) {
  static constexpr const char* kNames[] = {"embed",     "norm",     "qkv",     "rope_kv",
                                           "attention", "attn_out", "gate_up", "down",
                                           "head",      "sample",   "other"};
  static_assert(std::size(kNames) == static_cast<size_t>(Op::count));
  return kNames[static_cast<size_t>(op)];
}

}  // namespace turbomind
