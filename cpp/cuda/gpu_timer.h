// Times ops on a GPU by an event before and one after the work of each op, read by collect().
#pragma once

#include <vector>

#include "core/profiler.h"
#include "cuda/gpu.h"

namespace turbomind {

class GpuTimer final : public DeviceTimer {
 public:
  explicit GpuTimer(const GpuStream& stream) : stream_(stream) {}  // must outlive this
  void begin() override;
  // If the driver cannot record, this measurement is lost.
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
  std::vector<Span> passed_;  // not read yet, in the order of the work
  std::vector<Span> idle_;
  OpStats read_{};  // sums of spans that were read for want of room
};

}  // namespace turbomind
