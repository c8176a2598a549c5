#include "model/mixers/per_layer_mixer.h"

#include <cmath>

#include "ops/gate.h"
#include "ops/linear.h"
#include "ops/rows.h"

namespace turbomind {

namespace {

const float kHalfRoot = std::sqrt(0.5f);

// Returns the matrix without padding between its rows, so that each layer's part can be a row.
Mat dense(Mat m) {
  m.stride = m.cols;
  return m;
}

}  // namespace

void PerLayerInputs::declare(SlotList& slots, const ModelConfig& config,
                             PerLayerInputWeights& weights) {
  const int64_t all = static_cast<int64_t>(config.layers.size()) * config.per_layer;
  slots.add_linear("per_layer_embed", &weights.embed, Cut::vocabulary, config.vocab, all);
  slots.add_linear("per_layer_projection", &weights.projection, Cut::none, all, config.hidden);
  slots.add_vector("per_layer_norm", &weights.norm, Cut::none, config.per_layer);
}

void PerLayerInputs::reserve(const StepLimits& most) {
  Context& ctx = shared_.ctx;
  rows_.reserve(ctx, most.tokens, all(), DType::f32);
  projected_.reserve(ctx, most.tokens, all(), DType::f32);
  sampled_.reserve(ctx, most.samples, all(), DType::f32);
}

void PerLayerInputs::compute(const StepInputs& in, const Mat& h) {
  Context& ctx = shared_.ctx;
  inputs_ = dense(rows_.view(ctx, in.tokens, all(), DType::f32));
  shared_.embed(weights_.embed, weights_.embed_begin, in.token_ids,
                std::sqrt(0.5f * static_cast<float>(width())), inputs_);
  const Mat projected = dense(projected_.view(ctx, in.tokens, all(), DType::f32));
  linear(ctx, Op::other, weights_.projection, h, projected);
  // The projection is scaled by 1 / sqrt(hidden) before its norm, which only the eps notices.
  Norm norm = shared_.norm(weights_.norm);
  norm.eps *= static_cast<float>(shared_.config.hidden);
  Mat layers = projected;  // a row for each token and layer
  layers.rows = in.tokens * (all() / width());
  layers.cols = layers.stride = width();
  rms_norm(ctx, norm, layers, layers);
  add_scaled(ctx, projected, kHalfRoot, inputs_);
}

void PerLayerInputs::keep_sampled(const StepInputs& in) {
  const Mat sampled = dense(sampled_.view(shared_.ctx, in.samples, all(), DType::f32));
  gather_rows(shared_.ctx, inputs_, in.sample_rows, sampled);
  inputs_ = sampled;
}

Mat PerLayerInputs::of_layer(int layer) const {
  Mat part = inputs_;
  part.data = inputs_.f32(0) + int64_t{layer} * width();
  part.cols = width();
  return part;
}

void PerLayerMixer::declare(SlotList& slots, const std::string& prefix, const ModelConfig& config,
                            PerLayerWeights& weights) {
  slots.add_linear(prefix + "per_layer_gate", &weights.gate, Cut::none, config.per_layer,
                   config.hidden);
  slots.add_linear(prefix + "per_layer_out", &weights.out, Cut::none, config.hidden,
                   config.per_layer);
}

void PerLayerMixer::reserve(const StepLimits& most) {
  inputs_.gate.reserve(shared_.ctx, most.tokens, weights_.gate.n, DType::f32);
  inputs_.mid.reserve(shared_.ctx, most.tokens, weights_.gate.n, shared_.x_dtype(weights_.out));
}

Mat PerLayerMixer::run(const StepInputs&, const Mat&, const Mat& h, bool) {
  Context& ctx = shared_.ctx;
  const Mat gate = inputs_.gate.view(ctx, h.rows, weights_.gate.n, DType::f32);
  linear(ctx, Op::other, weights_.gate, h, gate);
  const Mat mid = inputs_.mid.view(ctx, h.rows, weights_.gate.n, shared_.x_dtype(weights_.out));
  const Epilogue epilogue = gated_epilogue(shared_.config.layers[layer_].activation);
  multiply_gate(ctx, epilogue, gate, inputs_.of_layer(layer_), mid);
  return mid;
}

void PerLayerMixer::finish(const Mat& mixed, Epilogue epilogue, const Mat& y) {
  linear(shared_.ctx, Op::other, weights_.out, mixed, y, {.epilogue = epilogue});
}

}  // namespace turbomind
