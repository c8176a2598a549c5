// Time, bytes and FLOPs by op, taken on the engine thread around each op: of the host, or of the
// device that does the work later.
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

using OpStats = std::array<OpStat, static_cast<size_t>(Op::count)>;

// Times what a device does behind the host's back. Used by the thread that submits the work.
class DeviceTimer {
 public:
  virtual ~DeviceTimer() = default;
  // Around what is submitted for an op; one at a time.
  virtual void begin() = 0;
  virtual void end(Op op) noexcept = 0;
  // Waits for what was submitted up to now and adds its time.
  virtual void collect(OpStats& stats) = 0;
};

class Profiler {
 public:
  bool enabled = false;
  DeviceTimer* device = nullptr;  // of the context's device; null: the host computes
  OpStats stats{};

  void collect() {
    if (device) device->collect(stats);
  }
  void reset() {
    collect();
    stats = {};
  }
};

// `device` is whoever does the op's work: the profiler's, or null for the host.
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
