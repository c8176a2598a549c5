// Experts: the sum of a few gated MLPs out of many, which a router chooses for each token, and of
// the layer's own MLP where there is one. With norms of their own (Gemma 4) MLP and experts are
// norm(mlp(h)) + norm(experts(norm(x))), and the router takes a norm of x too.
#pragma once

#include <memory>
#include <string>

#include "model/mixers/mixer_weights.h"
#include "model/mixers/mlp_mixer.h"
#include "model/mixers/slot_list.h"
#include "model/workspace.h"
#include "ops/routing.h"

namespace turbomind {

// Work memory that the experts of all layers share.
struct ExpertsWork {
  Workspace logits, routing, x, mid, out;
  Workspace mlp_out, mlp_gate;  // of the layer's MLP
  Workspace h;                  // x after a norm of the experts' own
};

class ExpertsMixer final : public Mixer {
 public:
  // Declares the slots "router", "experts.0.gate_up" and so on, whose names begin with `prefix`.
  static void declare(SlotList& slots, const std::string& prefix, int hidden,
                      const LayerConfig& layer, ExpertsWeights& weights);

  // `mlp` may be null.
  ExpertsMixer(const MixerContext& shared, int layer, const ExpertsWeights& weights,
               ExpertsWork& work, std::unique_ptr<MlpMixer> mlp);
  void reserve(const StepLimits& most) override;
  DType input_dtype() const override { return shared_.x_dtype(gate_up()); }
  Mat run(const StepInputs& in, const Mat& x, const Mat& h, bool kv_only) override;
  bool is_partial() const override { return !layer_.experts.own_norms; }
  void finish(const Mat& mixed, Epilogue epilogue, const Mat& y) override;

 private:
  Mat normed(const float* weight, const Mat& x);
  const LinearWeight& gate_up() const { return weights_.gate_up.weights[0]; }
  const LinearWeight& down() const { return weights_.down.weights[0]; }

  const MixerContext& shared_;
  const LayerConfig& layer_;
  const RouteShape shape_;
  const ExpertsWeights& weights_;
  ExpertsWork& work_;
  const std::unique_ptr<MlpMixer> mlp_;
  // Of the step:
  Routing routing_;
  Mat mlp_mixed_, mlp_gate_;
};

}  // namespace turbomind
