#include "model/mixers/mlp_mixer.h"

#include "ops/linear.h"

namespace turbomind {

void MlpMixer::declare(SlotList& slots, const std::string& prefix, int hidden,
                       const LayerConfig& layer, MlpWeights& weights) {
  const int64_t inner = layer.intermediate;
  slots.add_linear(prefix + "gate_up", &weights.gate_up, Cut::rows, 2 * inner, hidden, true);
  if (layer.mlp_bias)
    slots.add_vector(prefix + "gate_up_bias", &weights.gate_up_bias, Cut::rows, 2 * inner, true);
  slots.add_linear(prefix + "down", &weights.down, Cut::columns, hidden, inner);
  if (layer.mlp_bias)
    slots.add_vector(prefix + "down_bias", &weights.down_bias, Cut::first_rank, hidden);
}

void MlpMixer::reserve(const StepLimits& most) {
  Context& ctx = shared_.ctx;
  work_.mid.reserve(ctx, most.tokens, weights_.gate_up.n / 2, shared_.x_dtype(weights_.down));
  weights_.gate_up.format->reserve(ctx, weights_.gate_up, most.tokens);
}

Mat MlpMixer::run(const StepInputs&, const Mat&, const Mat& h, bool) {
  Context& ctx = shared_.ctx;
  const DType dtype = shared_.x_dtype(weights_.down);
  Mat mid = work_.mid.view(ctx, h.rows, weights_.gate_up.n / 2, dtype);
  linear(ctx, Op::gate_up, weights_.gate_up, h, mid,
         {.bias = weights_.gate_up_bias, .epilogue = gated_epilogue(layer_.activation)});
  mid.cols = layer_.intermediate;  // the rest is padding of the last block of gates and ups
  return mid;
}

void MlpMixer::finish(const Mat& mixed, Epilogue epilogue, const Mat& y) {
  linear(shared_.ctx, Op::down, weights_.down, mixed, y,
         {.bias = weights_.down_bias, .epilogue = epilogue});
}

}  // namespace turbomind
