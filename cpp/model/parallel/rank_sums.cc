#include "model/parallel/rank_sums.h"

#include <utility>

#include "core/error.h"
#include "model/parallel/rank_exchange.h"
#include "model/workspace.h"
#include "ops/rows.h"

namespace turbomind {

namespace {

class OneRank final : public RankSums {
 public:
  bool several() const override { return false; }
  void begin(const StepInputs&, const StepCancel* cancel) override { cancel_ = cancel; }
  bool cancelled() const override { return cancel_ && cancel_->requested(); }
  Mat part(int64_t, int64_t) override { throw_error(ErrorCode::internal, kNoOther); }
  void sum(const RankSum&) override { throw_error(ErrorCode::internal, kNoOther); }
  Columns columns(const Mat& logits, int64_t, int64_t) override { return {logits}; }
  void join_columns(const Mat&) override {}

 private:
  static constexpr const char* kNoOther = "a sum over ranks: got one rank, expected several";
  const StepCancel* cancel_ = nullptr;
};

// Ranks on the CPU, each with a thread of its own.
class HostRankSums final : public RankSums {
 public:
  HostRankSums(Context& ctx, RankLink link) : ctx_(ctx), exchange_(*link.host), rank_(link.rank) {}

  void begin(const StepInputs&, const StepCancel* cancel) override { cancel_ = cancel; }
  // The first rank looks at the flags before each sum.
  bool cancelled() const override { return exchange_.cancelled(rank_); }

  Mat part(int64_t rows, int64_t cols) override {
    std::swap(memory_[0], memory_[1]);  // other ranks may still read the last part
    return part_ = memory_[0].view(ctx_, rows, cols, DType::f32);
  }
  void sum(const RankSum& sum) override {
    sum_rows(ctx_, parts(), sum.scale, sum.add, sum.x);
    if (sum.y.data) rms_norm(ctx_, sum.norm, sum.x, sum.y);
  }

  Columns columns(const Mat& logits, int64_t begin, int64_t) override {
    return {logits, true, begin};
  }
  void join_columns(const Mat&) override {}  // they are all in one matrix

 private:
  const std::vector<Mat>& parts() {
    const ProfileScope wait(ctx_.profiler, Op::reduce_wait, 0, 0);
    return exchange_.add(rank_, part_, cancel_ && cancel_->requested(), ctx_.pool);
  }

  Context& ctx_;
  RankExchange& exchange_;
  const int rank_;
  const StepCancel* cancel_ = nullptr;
  Workspace memory_[2];  // the first has the newer part
  Mat part_;
};

}  // namespace

std::unique_ptr<RankSums> make_rank_sums(Context& ctx, RankLink link) {
  if (link.gpu) return make_gpu_rank_sums(ctx, link);
  if (link.host) return std::make_unique<HostRankSums>(ctx, link);
  return std::make_unique<OneRank>();
}

}  // namespace turbomind
