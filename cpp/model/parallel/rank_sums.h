// The sums over ranks that a rank's decoder makes in a step, and the memory of its parts of them.
#pragma once

#include <utility>
#include <vector>

#include "model/model.h"
#include "model/parallel/rank_exchange.h"
#include "model/workspace.h"
#include "ops/rows.h"

namespace turbomind {

class RankSums {
 public:
  explicit RankSums(RankLink link) : link_(link) {}

  bool several() const { return static_cast<bool>(link_); }
  // Starts a step; `cancel` may be null.
  void begin(const StepCancel* cancel) { cancel_ = cancel; }
  // Whether the step is to end between two layers. Ranks agree: the first one looks at the flags
  // before each sum.
  bool cancelled() const { return link_ ? link_.exchange->cancelled(link_.rank) : is_requested(); }

  // Calls make(memory for the rank's part of y) and returns the parts of all ranks in their order,
  // valid until the next sum.
  template <typename Make>
  const std::vector<Mat>& parts(Context& ctx, const Mat& y, Make make) {
    std::swap(memory_[0], memory_[1]);  // other ranks may still read the last part
    const Mat part = memory_[0].view(ctx, y.rows, y.cols, DType::f32);
    make(part);
    const ProfileScope wait(ctx.profiler, Op::reduce_wait, 0, 0);
    return link_.exchange->add(link_.rank, part, is_requested(), ctx.pool);
  }
  // y = the sum of the parts; with one rank make(y).
  template <typename Make>
  void total(Context& ctx, const Mat& y, Make make) {
    if (!link_) return make(y);
    sum_rows(ctx, parts(ctx, y, make), 1.0f, false, y);
  }

 private:
  bool is_requested() const { return cancel_ && cancel_->requested(); }

  const RankLink link_;
  const StepCancel* cancel_ = nullptr;
  Workspace memory_[2];  // the first has the newer part
};

}  // namespace turbomind
