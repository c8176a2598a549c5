#include "model/mixers/attention_mixer.h"

#include <cmath>

#include "ops/linear.h"

namespace turbomind {

void AttentionMixer::declare(SlotList& slots, const std::string& prefix, int hidden,
                             const LayerConfig& layer, AttentionWeights& weights) {
  const bool own_kv = layer.kv_layer < 0;
  const int64_t kv_rows = own_kv ? int64_t{layer.kv_heads} * (layer.k_dim + layer.v_dim) : 0;
  const int64_t rows = int64_t{layer.heads} * layer.k_dim + kv_rows;
  slots.add_linear(prefix + "qkv", &weights.qkv, Cut::heads(layer), rows, hidden);
  if (layer.qkv_bias)
    slots.add_vector(prefix + "qkv_bias", &weights.qkv_bias, Cut::heads(layer), rows);
  if (layer.qk_norm || layer.qk_norm_all) {
    const int64_t q = layer.qk_norm_all ? layer.heads : 1,
                  k = layer.qk_norm_all ? layer.kv_heads : 1;
    slots.add_vector(prefix + "q_norm", &weights.q_norm, Cut::none, q * layer.k_dim);
    if (own_kv) slots.add_vector(prefix + "k_norm", &weights.k_norm, Cut::none, k * layer.k_dim);
  }
  if (layer.sinks) slots.add_vector(prefix + "sinks", &weights.sinks, Cut::rows, layer.heads);
  slots.add_linear(prefix + "o", &weights.o, Cut::columns, hidden,
                   int64_t{layer.heads} * layer.v_dim);
  if (layer.o_bias) slots.add_vector(prefix + "o_bias", &weights.o_bias, Cut::first_rank, hidden);
}

AttentionMixer::AttentionMixer(const MixerContext& shared, int layer,
                               const AttentionWeights& weights, AttentionWork& work)
    : shared_(shared),
      layer_(shared.config.layers[layer]),
      layout_(shared.cache.layout_of_layer[layer]),
      group_(shared.cache.group_of_layer[layer]),
      weights_(weights),
      work_(work) {
  shape_.heads = layer_.heads;
  shape_.kv_heads = layer_.kv_heads;
  shape_.k_dim = layer_.k_dim;
  shape_.v_dim = layer_.v_dim;
  shape_.scale = layer_.attn_scale != 0 ? layer_.attn_scale
                                        : 1.0f / std::sqrt(static_cast<float>(layer_.k_dim));
  shape_.softcap = layer_.softcap;
  shape_.window = layer_.window;
  shape_.sinks = weights_.sinks;
  if (layer_.qk_norm) norms_.q = shared_.norm(weights_.q_norm);
  if (layer_.qk_norm && weights_.k_norm) norms_.k = shared_.norm(weights_.k_norm);
  if (layer_.v_norm) norms_.v = {NormKind::rms, shared_.config.norm_eps};
}

void AttentionMixer::reserve(const StepLimits& most) {
  Context& ctx = shared_.ctx;
  const int64_t heads = layer_.heads;
  work_.qkv.reserve(ctx, most.tokens, weights_.qkv.n, DType::f32);
  work_.q.reserve(ctx, most.tokens, heads * layout_.k_width(),
                  attention_q_dtype(ctx, layout_.dtype));
  work_.out.reserve(ctx, most.tokens, heads * layer_.v_dim, shared_.x_dtype(weights_.o));
}

Mat AttentionMixer::run(const StepInputs& in, const Mat&, const Mat& h, bool kv_only) {
  Context& ctx = shared_.ctx;
  const PageView pages = shared_.pages.view(group_);
  const SeqBatch& seqs = in.groups[group_];
  const int64_t heads = layer_.heads;

  const Mat qkv = work_.qkv.dense_view(ctx, h.rows, weights_.qkv.n, DType::f32);
  linear(ctx, Op::qkv, weights_.qkv, h, qkv, {.bias = weights_.qkv_bias});
  const Mat q = work_.q.dense_view(ctx, h.rows, heads * layout_.k_width(),
                                   attention_q_dtype(ctx, layout_.dtype));
  if (layer_.qk_norm_all) norm_all_heads(qkv);
  rope_write_kv(ctx, shape_, layout_, pages, seqs, qkv, norms_,
                layer_.rope >= 0 ? in.ropes[layer_.rope] : StepRope{}, q);
  const Mat out = work_.out.view(ctx, h.rows, heads * layer_.v_dim, shared_.x_dtype(weights_.o));
  if (!kv_only) attention(ctx, shape_, layout_, pages, seqs, q, out, work_.scratch);
  return out;
}

void AttentionMixer::norm_all_heads(const Mat& qkv) {
  const int64_t q = int64_t{layer_.heads} * layer_.k_dim,
                k = int64_t{layer_.kv_heads} * layer_.k_dim;
  const Mat q_part{qkv.data, qkv.dtype, qkv.rows, q, qkv.stride};
  const Mat k_part{qkv.f32(0) + q, qkv.dtype, qkv.rows, k, qkv.stride};
  rms_norm_in_place(shared_.ctx, shared_.norm(weights_.q_norm), q_part);
  rms_norm_in_place(shared_.ctx, shared_.norm(weights_.k_norm), k_part);
}

void AttentionMixer::finish(const Mat& mixed, Epilogue epilogue, const Mat& y) {
  linear(shared_.ctx, Op::attn_out, weights_.o, mixed, y,
         {.bias = weights_.o_bias, .epilogue = epilogue});
}

}  // namespace turbomind
