#include "core/profiler.h"

namespace turbomind {

const char* op_name(Op op) {
  static constexpr const char* kNames[] = {"embed",       "norm",    "qkv",  "rope_kv", "attention",
                                           "attn_out",    "gate_up", "down", "head",    "reduce",
                                           "reduce_wait", "sample",  "other"};
  static_assert(std::size(kNames) == static_cast<size_t>(Op::count));
  return kNames[static_cast<size_t>(op)];
}

OpStats join_stats(const std::vector<OpStats>& ranks) {
  OpStats joined{};
  for (const OpStats& rank : ranks)
    for (size_t i = 0; i < rank.size(); ++i) {
      OpStat& op = joined[i];
      op.bytes += rank[i].bytes;
      op.flops += rank[i].flops;
      if (rank[i].ns < op.ns || rank[i].calls == 0) continue;
      op.calls = rank[i].calls;
      op.ns = rank[i].ns;
    }
  return joined;
}

}  // namespace turbomind
