// Ranks on GPUs: an exchange is a kernel of each rank (ops/rank_sum_cuda.h).
#include "core/error.h"
#include "cuda/dispatch.h"
#include "model/parallel/gpu_exchange.h"
#include "model/parallel/rank_sums.h"

namespace turbomind {

TM_GPU_TABLE(RankSumCuda, kRankSumCuda, rank_sum_cuda)

namespace {

// The parts of successive exchanges lie in two memories in turn. A step ends with an exchange that
// has no parts: a next one may then begin with any of the two, as when a captured step is replayed,
// and when the first rank has ended a step, so have all.
class GpuRankSums final : public RankSums {
 public:
  GpuRankSums(Context& ctx, RankLink link)
      : ctx_(ctx), gpu_(*ctx.gpu), exchange_(*link.gpu), rank_(link.rank) {}

  bool cuts_tables() const override { return true; }
  void begin(const StepInputs& in, const StepCancel*) override {
    number_ = 0;
    first_count_ = in.first_count;
  }
  bool cancelled() const override { return false; }  // a step is submitted as a whole
  void end() override {
    ++number_;
    exchange_.take_turn(rank_, ctx_.pool);
    meet();
  }

  Mat part(int64_t rows, int64_t cols) override {
    return exchange_.part(rank_, number_ + 1, rows, cols);
  }
  void sum(const RankSum& sum) override {
    begin_exchange();
    DeviceRankSum s = exchange_.sum_of(rank_, number_, sum.x.rows, sum.x.cols);
    s.exchange.base = first_count_;
    s.x = sum.x.f32(0);
    s.x_stride = sum.x.stride;
    s.scale = sum.scale;
    s.add = sum.add;
    s.norm = device_norm(sum.norm, sum.x, sum.y);
    const double elements = static_cast<double>(sum.x.rows * sum.x.cols);
    const double read = exchange_.ranks() + sum.add;  // matrices
    const ProfileScope profile(ctx_.profiler, Op::reduce, 4 * elements * (read + 1),
                               elements * read, ctx_.profiler.device);
    kernels().sum(gpu_.handle(), s);
  }

  Columns columns(const Mat& logits, int64_t, int64_t) override {
    return {exchange_.logits(rank_, logits.rows)};
  }
  void join_columns(const Mat& logits) override {
    begin_exchange();
    DeviceRankColumns c = exchange_.columns_of(rank_, number_, logits.rows);
    c.exchange.base = first_count_;
    if (rank_ == 0) {
      c.y = logits.f32(0);
      c.y_stride = logits.stride;
    }
    const double bytes = rank_ == 0 ? 8.0 * static_cast<double>(logits.rows * logits.cols) : 0;
    const ProfileScope profile(ctx_.profiler, Op::reduce, bytes, 0, ctx_.profiler.device);
    kernels().columns(gpu_.handle(), c);
  }

 private:
  const RankSumCuda& kernels() const { return rank_sum_cuda(gpu_.kind()); }
  // A profiled step waits in a kernel of its own, so that the time of the sum is that of the sum.
  void begin_exchange() {
    ++number_;
    exchange_.take_turn(rank_, ctx_.pool);
    if (ctx_.profiler.enabled) meet();
  }
  void meet() const {
    const ProfileScope profile(ctx_.profiler, Op::reduce_wait, 0, 0, ctx_.profiler.device);
    DeviceExchange e = exchange_.meeting(rank_, number_);
    e.base = first_count_;
    kernels().meet(gpu_.handle(), e);
  }

  Context& ctx_;
  GpuContext& gpu_;
  GpuExchange& exchange_;
  const int rank_;
  uint32_t number_ = 0;  // of the last exchange of this step
  const uint32_t* first_count_ = nullptr;
};

}  // namespace

const RankSumCuda& rank_sum_kernels(GpuKind kind) {
  return rank_sum_cuda(kind);
}

std::unique_ptr<RankSums> make_gpu_rank_sums(Context& ctx, RankLink link) {
  return std::make_unique<GpuRankSums>(ctx, link);
}

}  // namespace turbomind
