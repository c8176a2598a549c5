// Time, bytes and FLOPs by op, measured on the engine thread around each op. A device measures its
// own times, which are read later (DeviceTimer).
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <iterator>
#include <vector>

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
  reduce,       // sums over ranks
  reduce_wait,  // for the parts that other ranks add to them
  sample,
  other,
  count
};
const char* op_name(Op op);

struct OpStat {
  int64_t calls = 0;
  int64_t ns = 0;
  double bytes = 0;  // least bytes that the op moves (weights, KV, activations)
  double flops = 0;
};

using OpStats = std::array<OpStat, static_cast<size_t>(Op::count)>;

// Joins the tables of ranks, which compute side by side: calls and time are those of the rank that
// takes the longest with the op, bytes and FLOPs are sums.
OpStats join_stats(const std::vector<OpStats>& ranks);

// Measures work that a device does asynchronously. Used by the thread that submits the work.
class DeviceTimer {
 public:
  virtual ~DeviceTimer() = default;
  // Enclose the work that is submitted for one op; they do not nest.
  virtual void begin() = 0;
  virtual void end(Op op) noexcept = 0;
  // Waits for all work submitted so far and adds its times to `stats`.
  virtual void collect(OpStats& stats) = 0;
};

class Profiler {
 public:
  bool enabled = false;
  DeviceTimer* device = nullptr;  // the timer of the context's device; null: the host computes
  OpStats stats{};

  void collect() {
    if (device) device->collect(stats);
  }
  void reset() {
    collect();
    stats = {};
  }
};

// Measures the op of one scope. `device` does the op's work: the profiler's timer, or null for the
// host.
class ProfileScope {
 public:
  ProfileScope(Profiler& p, Op op, double bytes, double flops, DeviceTimer* device = nullptr)
      : p_(p), op_(op), device_(device) {
    if (!p_.enabled) return;
    auto& s = p_.stats[static_cast<size_t>(op_)];
    s.calls += 1;
    s.bytes += bytes;
    s.flops += flops;
    if (device_)
      device_->begin();
    else
      start_ = std::chrono::steady_clock::now();
  }
  ~ProfileScope() {
    if (!p_.enabled) return;
    if (device_) {
      device_->end(op_);
      return;
    }
    const auto took = std::chrono::steady_clock::now() - start_;
    p_.stats[static_cast<size_t>(op_)].ns +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(took).count();
  }

 private:
  Profiler& p_;
  Op op_;
  DeviceTimer* device_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace turbomind
