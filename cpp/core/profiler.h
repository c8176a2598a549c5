// Time, bytes and FLOPs by op, taken on the engine thread around each op.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <iterator>

namespace turbomind {

enum class Op : uint8_t {
  embed,
  norm,
  qkv,
  rope_kv,
  attention,
  attn_out,
  gate_up,
  down,
  head,
  sample,
  other,
  count
};
const char* op_name(Op op);

struct OpStat {
  int64_t calls = 0;
  int64_t ns = 0;
  double bytes = 0;  // bytes the op must move at least (weights, KV, activations)
  double flops = 0;
};

class Profiler {
 public:
  bool enabled = false;
  std::array<OpStat, static_cast<size_t>(Op::count)> stats{};
  void reset() { stats = {}; }
};

class ProfileScope {
 public:
  ProfileScope(Profiler& p, Op op, double bytes, double flops) : p_(p), op_(op) {
    if (!p_.enabled) return;
    auto& s = p_.stats[static_cast<size_t>(op_)];
    s.calls += 1;
    s.bytes += bytes;
    s.flops += flops;
    start_ = std::chrono::steady_clock::now();
  }
  ~ProfileScope() {
    if (!p_.enabled) return;
    p_.stats[static_cast<size_t>(op_)].ns += std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                 std::chrono::steady_clock::now() - start_)
                                                 .count();
  }

 private:
  Profiler& p_;
  Op op_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace turbomind
