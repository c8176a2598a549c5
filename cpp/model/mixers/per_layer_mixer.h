// Per-layer inputs: rows of a second embedding, of which each layer mixes a part into its residual
// stream (Gemma 3n and the small models of Gemma 4).
#pragma once

#include <string>

#include "model/mixers/mixer.h"
#include "model/mixers/mixer_weights.h"
#include "model/mixers/slot_list.h"
#include "model/workspace.h"

namespace turbomind {

// The inputs of all layers for the rows of a step, and the work memory of their mixers.
class PerLayerInputs {
 public:
  // Declares the slots "per_layer_embed", "per_layer_projection" and "per_layer_norm".
  static void declare(SlotList& slots, const ModelConfig& config, PerLayerInputWeights& weights);

  PerLayerInputs(const MixerContext& shared, const PerLayerInputWeights& weights)
      : shared_(shared), weights_(weights) {}
  void reserve(const StepLimits& most);
  // Computes the inputs for the embedded tokens h [tokens, hidden], of the type that the weight
  // "per_layer_projection" takes.
  void compute(const StepInputs& in, const Mat& h);
  // Drops the rows of tokens that are not sampled.
  void keep_sampled(const StepInputs& in);
  // Returns the inputs of a layer: [rows, per_layer] float32.
  Mat of_layer(int layer) const;

  Workspace gate, mid;  // of the mixer that runs

 private:
  int width() const { return shared_.config.per_layer; }
  int64_t all() const { return weights_.projection.n; }

  const MixerContext& shared_;
  const PerLayerInputWeights& weights_;
  Workspace rows_, projected_, sampled_;
  Mat inputs_;  // [rows, layers per_layer]
};

// out(activation(gate(x)) * the layer's input), for x without a norm.
class PerLayerMixer final : public Mixer {
 public:
  // Declares the slots "per_layer_gate" and "per_layer_out", whose names begin with `prefix`.
  static void declare(SlotList& slots, const std::string& prefix, const ModelConfig& config,
                      PerLayerWeights& weights);

  PerLayerMixer(const MixerContext& shared, int layer, const PerLayerWeights& weights,
                PerLayerInputs& inputs)
      : shared_(shared), layer_(layer), weights_(weights), inputs_(inputs) {}
  void reserve(const StepLimits& most) override;
  DType input_dtype() const override { return shared_.x_dtype(weights_.gate); }
  Mat run(const StepInputs& in, const Mat& x, const Mat& h, bool kv_only) override;
  bool is_partial() const override { return false; }  // it is small, so every rank computes it
  void finish(const Mat& mixed, Epilogue epilogue, const Mat& y) override;

 private:
  const MixerContext& shared_;
  const int layer_;
  const PerLayerWeights& weights_;
  PerLayerInputs& inputs_;
};

}  // namespace turbomind
