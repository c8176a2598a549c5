// Times ops on a GPU: an event before and one behind the work of each, read when somebody asks.
#pragma once

#include <vector>

#include "core/profiler.h"
#include "cuda/gpu.h"

namespace turbomind {

class GpuTimer final : public DeviceTimer {
 public:
  explicit GpuTimer(const GpuStream& stream) : stream_(stream) {}  // which stays alive
  void begin() override;
  // A driver that cannot record costs this measurement alone.
  void end(Op op) noexcept override;
  void collect(OpStats& stats) override;

 private:
  struct Span {
    Op op = Op::other;
    GpuEvent begin, end;
  };
  void read(Span& span, OpStats& stats);

  const GpuStream& stream_;
  Span current_;
  std::vector<Span> passed_;  // in the order of the work; not read yet
  std::vector<Span> idle_;
  OpStats read_{};  // of spans that made room for others
};

}  // namespace turbomind
