// The parts of a layer. A layer is a list of blocks: x += scale * norm(mixer(norm(x))), where the
// second norm may be absent. The decoder walks the blocks; a mixer is one file that declares its
// weight slots, reserves its work memory and runs.
#pragma once

#include "core/context.h"
#include "core/tensor.h"
#include "linear/weight_format.h"
#include "model/config.h"
#include "model/device/step_device.h"
#include "model/parallel/rank_sums.h"
#include "model/step_inputs.h"
#include "ops/embedding.h"
#include "ops/norm.h"

namespace turbomind {

// What the mixers of a decoder share; it outlives them.
struct MixerContext {
  Context& ctx;
  const ModelConfig& config;
  const CachePlan& cache;
  const DecoderPages& pages;
  RankSums& sums;

  Norm norm(const float* weight) const {
    return {weight ? NormKind::rms : NormKind::none, config.norm_eps, config.norm_weight_offset,
            weight};
  }
  // The type in which an op writes what `w` multiplies.
  DType x_dtype(const LinearWeight& w) const { return w.format->activation_dtype(ctx.isa); }
  // y = scale * rows ids[0..) of a table, from row `begin` on of which the rank has a part.
  void embed(const LinearWeight& table, int64_t begin, const int32_t* ids, float scale,
             const Mat& y) const {
    const auto make = [&](const Mat& to) { embedding(ctx, table, ids, scale, to, begin); };
    if (sums.cuts_tables())
      sums.total(y, make);
    else
      make(y);
  }
};

// The epilogue of a product with gates and ups.
constexpr Epilogue gated_epilogue(Activation a) {
  return a == Activation::silu        ? Epilogue::silu_mul
         : a == Activation::gelu_tanh ? Epilogue::gelu_mul
                                      : Epilogue::swiglu_mul;
}

// The mixer of one layer. Its end is apart from the rest because the result may be added to the
// residual stream where it is computed, and may be needed for some rows only.
class Mixer {
 public:
  virtual ~Mixer() = default;
  virtual void reserve(const StepLimits& most) = 0;
  // The type of h.
  virtual DType input_dtype() const = 0;
  // Returns what finish() takes, for the residual stream x [tokens, hidden] and h, which is x after
  // the norm; valid until the next mixer of this kind runs. `kv_only`: only the KV is needed, which
  // the returned rows are then not.
  virtual Mat run(const StepInputs& in, const Mat& x, const Mat& h, bool kv_only) = 0;
  // Whether finish() of a rank of several makes its part of a sum over ranks, not the whole.
  virtual bool is_partial() const { return true; }
  // The last products. y [rows, hidden] float32 becomes their result, or it is added to y.
  virtual void finish(const Mat& mixed, Epilogue epilogue, const Mat& y) = 0;
};

}  // namespace turbomind
