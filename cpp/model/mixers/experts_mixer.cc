#include "model/mixers/experts_mixer.h"

#include <cmath>

#include "ops/linear.h"
#include "ops/rows.h"

namespace turbomind {

void ExpertsMixer::declare(SlotList& slots, const std::string& prefix, int hidden,
                           const LayerConfig& layer, ExpertsWeights& weights) {
  const ExpertsConfig& c = layer.experts;
  slots.add_linear(prefix + "router", &weights.router, Cut::none, c.count, hidden);
  slots.add_group(prefix + "experts.", "gate_up", c.count, &weights.gate_up, Cut::rows,
                  2 * c.intermediate, hidden, true);
  slots.add_group(prefix + "experts.", "down", c.count, &weights.down, Cut::columns, hidden,
                  c.intermediate);
  if (c.router_bias)
    slots.add_vector(prefix + "router_bias", &weights.router_bias, Cut::none, c.count);
  if (c.bias) {
    slots.add_biases(prefix + "experts.", "gate_up_bias", c.count, &weights.gate_up, Cut::rows,
                     2 * c.intermediate, true);
    slots.add_biases(prefix + "experts.", "down_bias", c.count, &weights.down, Cut::first_rank,
                     hidden);
  }
  if (layer.mlp_gate)
    slots.add_linear(prefix + "mlp_gate", &weights.mlp_gate, Cut::none, 1, hidden);
  const auto add_vector = [&](const char* name, const float** v, int64_t size) {
    slots.add_vector(prefix + "experts." + name, v, Cut::none, size);
  };
  if (c.scaled) add_vector("scale", &weights.scale, c.count);
  if (!c.own_norms) return;
  add_vector("router_norm", &weights.router_norm, hidden);
  add_vector("norm", &weights.norm, hidden);
  add_vector("post_norm", &weights.post_norm, hidden);
  add_vector("mlp_post_norm", &weights.mlp_post_norm, hidden);
}

ExpertsMixer::ExpertsMixer(const MixerContext& shared, int layer, const ExpertsWeights& weights,
                           ExpertsWork& work, std::unique_ptr<MlpMixer> mlp)
    : shared_(shared),
      layer_(shared.config.layers[layer]),
      shape_{layer_.experts.count, layer_.experts.top_k, layer_.experts.renormalize, weights.scale},
      weights_(weights),
      work_(work),
      mlp_(std::move(mlp)) {}

void ExpertsMixer::reserve(const StepLimits& most) {
  Context& ctx = shared_.ctx;
  const int64_t rows = most.tokens * shape_.top_k;
  work_.logits.reserve(ctx, most.tokens, shape_.experts, DType::f32);
  work_.routing.reserve(ctx, 1, routing_elements(most.tokens, shape_), DType::f32);
  work_.x.reserve(ctx, rows, gate_up().k, input_dtype());
  work_.mid.reserve(ctx, rows, gate_up().n / 2, shared_.x_dtype(down()));
  work_.out.reserve(ctx, rows, down().n, DType::f32);
  if (layer_.experts.own_norms) work_.h.reserve(ctx, most.tokens, gate_up().k, input_dtype());
  if (mlp_ == nullptr) return;
  mlp_->reserve(most);
  work_.mlp_out.reserve(ctx, most.tokens, down().n, DType::f32);
  if (layer_.mlp_gate) work_.mlp_gate.reserve(ctx, most.tokens, 1, DType::f32);
}

// The result is valid until the next call.
Mat ExpertsMixer::normed(const float* weight, const Mat& x) {
  const Mat h = work_.h.view(shared_.ctx, x.rows, x.cols, input_dtype());
  rms_norm(shared_.ctx, shared_.norm(weight), x, h);
  return h;
}

Mat ExpertsMixer::run(const StepInputs& in, const Mat& x, const Mat& h, bool kv_only) {
  Context& ctx = shared_.ctx;
  const bool own_norms = layer_.experts.own_norms;
  if (mlp_) mlp_mixed_ = mlp_->run(in, x, h, kv_only);
  if (layer_.mlp_gate) {
    mlp_gate_ = work_.mlp_gate.view(ctx, h.rows, 1, DType::f32);
    linear(ctx, Op::other, weights_.mlp_gate, h, mlp_gate_);
  }
  const Mat logits = work_.logits.view(ctx, h.rows, shape_.experts, DType::f32);
  linear(ctx, Op::other, weights_.router, own_norms ? normed(weights_.router_norm, x) : h, logits,
         {.bias = weights_.router_bias});
  if (own_norms) scale_and_cap(ctx, 1 / std::sqrt(static_cast<float>(x.cols)), 0, logits);
  const Mat arrays = work_.routing.view(ctx, 1, routing_elements(h.rows, shape_), DType::f32);
  routing_ = routing_in(arrays.data, h.rows, shape_);
  route(ctx, shape_, logits, routing_);
  const Mat rows = work_.x.view(ctx, routing_.rows(), h.cols, h.dtype);
  gather_rows(ctx, own_norms ? normed(weights_.norm, x) : h, routing_.token, rows);
  Mat mid = work_.mid.view(ctx, rows.rows, gate_up().n / 2, shared_.x_dtype(down()));
  linear_group(ctx, Op::gate_up, weights_.gate_up, routing_.begin, h.rows, rows, mid,
               gated_epilogue(layer_.activation));
  mid.cols = layer_.experts.intermediate;  // the rest is padding of the last block
  return mid;
}

void ExpertsMixer::finish(const Mat& mixed, Epilogue epilogue, const Mat& y) {
  Context& ctx = shared_.ctx;
  const Mat out = work_.out.view(ctx, mixed.rows, y.cols, DType::f32);
  linear_group(ctx, Op::down, weights_.down, routing_.begin, routing_.tokens, mixed, out,
               Epilogue::store);
  Mat mlp_out;
  if (mlp_) mlp_out = work_.mlp_out.view(ctx, y.rows, y.cols, DType::f32);
  const auto finish_mlp = [&](const Mat& to) { mlp_->finish(mlp_mixed_, Epilogue::store, to); };
  if (!layer_.experts.own_norms) {
    if (mlp_) finish_mlp(mlp_out);
    return combine(ctx, routing_, out, {mlp_out, mlp_gate_}, epilogue == Epilogue::add, y);
  }
  // Norms follow, so y is not the residual stream, and ranks need both sums before them.
  shared_.sums.total(mlp_out, finish_mlp);
  shared_.sums.total(y, [&](const Mat& to) { combine(ctx, routing_, out, {}, false, to); });
  rms_norm(ctx, shared_.norm(weights_.post_norm), y, y);
  rms_norm(ctx, shared_.norm(weights_.mlp_post_norm), mlp_out, mlp_out);
  add_scaled(ctx, mlp_out, 1, y);
}

}  // namespace turbomind
