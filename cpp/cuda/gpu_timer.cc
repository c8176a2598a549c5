#include "cuda/gpu_timer.h"

#include <utility>

namespace turbomind {

namespace {
constexpr size_t kMostSpans = 4096;  // most spans not read yet
}

void GpuTimer::begin() {
  if (passed_.size() >= kMostSpans) collect(read_);
  if (idle_.empty()) {
    Gpu& gpu = stream_.gpu();
    current_ = {Op::other, GpuEvent(gpu, true), GpuEvent(gpu, true)};
  } else {
    current_ = std::move(idle_.back());
    idle_.pop_back();
  }
  current_.begin.record(stream_);
}

void GpuTimer::end(Op op) noexcept {
  try {
    current_.op = op;
    current_.end.record(stream_);
    passed_.push_back(std::move(current_));
  } catch (...) {
    current_ = {};
  }
}

void GpuTimer::collect(OpStats& stats) {
  for (size_t i = 0; i < stats.size(); ++i) stats[i].ns += std::exchange(read_[i].ns, 0);
  for (Span& span : passed_) {
    read(span, stats);
    idle_.push_back(std::move(span));
  }
  passed_.clear();
}

void GpuTimer::read(Span& span, OpStats& stats) {
  span.end.synchronize();
  const float ms = stream_.gpu().elapsed_ms(span.begin.handle(), span.end.handle());
  stats[static_cast<size_t>(span.op)].ns += static_cast<int64_t>(1e6 * static_cast<double>(ms));
}

}  // namespace turbomind
