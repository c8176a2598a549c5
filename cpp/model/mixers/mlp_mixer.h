// The gated MLP: down(activation(gate(h)) * up(h)).
#pragma once

#include <string>

#include "model/mixers/mixer.h"
#include "model/mixers/mixer_weights.h"
#include "model/mixers/slot_list.h"
#include "model/workspace.h"

namespace turbomind {

// Work memory that the MLPs of all layers share.
struct MlpWork {
  Workspace mid;
};

class MlpMixer final : public Mixer {
 public:
  // Declares the slots "gate_up", "down" and so on, whose names begin with `prefix`.
  static void declare(SlotList& slots, const std::string& prefix, int hidden,
                      const LayerConfig& layer, MlpWeights& weights);

  MlpMixer(const MixerContext& shared, int layer, const MlpWeights& weights, MlpWork& work)
      : shared_(shared), layer_(shared.config.layers[layer]), weights_(weights), work_(work) {}
  void reserve(const StepLimits& most) override;
  DType input_dtype() const override { return shared_.x_dtype(weights_.gate_up); }
  Mat run(const StepInputs& in, const Mat& x, const Mat& h, bool kv_only) override;
  void finish(const Mat& mixed, Epilogue epilogue, const Mat& y) override;

 private:
  const MixerContext& shared_;
  const LayerConfig& layer_;
  const MlpWeights& weights_;
  MlpWork& work_;
};

}  // namespace turbomind
