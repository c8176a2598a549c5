// What a rank's decoder exchanges with the other ranks in a step: sums of which each makes a part,
// columns of the logits, and whether the step goes on.
#pragma once

#include <cstdint>
#include <memory>

#include "core/context.h"
#include "core/tensor.h"
#include "cuda/gpu.h"
#include "model/model.h"
#include "model/step_inputs.h"
#include "ops/norm.h"

namespace turbomind {

class GpuExchange;
class RankExchange;
struct RankSumCuda;

// A rank's end of an exchange; none where there is one rank.
struct RankLink {
  RankExchange* host = nullptr;
  GpuExchange* gpu = nullptr;
  int rank = 0;
};

// x = scale * (the sum of the ranks' parts in their order), or x += it, then y = norm(x) unless y
// has no data. x is float32; the norm is rms_norm()'s.
struct RankSum {
  Mat x;
  float scale = 1;
  bool add = false;
  Norm norm{};
  Mat y{};
};

// Ranks make the same calls in the same order.
class RankSums {
 public:
  virtual ~RankSums() = default;

  virtual bool several() const { return true; }
  // Whether ranks have parts of the tables that are read by row.
  virtual bool cuts_tables() const { return false; }
  // Starts a step; `cancel` may be null.
  virtual void begin(const StepInputs& in, const StepCancel* cancel) = 0;
  // Whether the step is to end between two layers. Ranks agree.
  virtual bool cancelled() const = 0;
  // Ends a step that computes no logits.
  virtual void end() {}

  // Returns memory for the rank's part of the next sum, and makes the sum.
  virtual Mat part(int64_t rows, int64_t cols) = 0;
  virtual void sum(const RankSum& sum) = 0;
  // Calls make(memory for the rank's part of y), and y = the sum; with one rank make(y).
  template <typename Make>
  void total(const Mat& y, Make make) {
    if (!several()) return make(y);
    make(part(y.rows, y.cols));
    sum({y});
  }

  // Where a rank computes its columns of the logits: from `first_col` on in a matrix of all, or a
  // matrix of their own.
  struct Columns {
    Mat y;
    bool part = false;  // y has the columns of other ranks too
    int64_t first_col = 0;
  };
  virtual Columns columns(const Mat& logits, int64_t begin, int64_t count) = 0;
  // Brings the columns of all ranks into `logits`, and ends the step.
  virtual void join_columns(const Mat& logits) = 0;
};

// `ctx` and what `link` points to stay alive.
std::unique_ptr<RankSums> make_rank_sums(Context& ctx, RankLink link);
std::unique_ptr<RankSums> make_gpu_rank_sums(Context& ctx, RankLink link);
// Returns the kernels of exchanges (ops/rank_sum_cuda.h).
const RankSumCuda& rank_sum_kernels(GpuKind kind);

}  // namespace turbomind
