// One forward pass: embedding, layers, norm, head. It has no branch on the device: StepDevice runs
// a step, and the ops choose their kernels.
#include "model/decoder.h"

#include <cmath>

#include "model/decoder_impl.h"
#include "model/step_device.h"
#include "model/workspace.h"
#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/norm.h"
#include "ops/rope_kv.h"
#include "ops/rows.h"

namespace turbomind {

namespace {

Mat with_cols(Mat m, int64_t cols) {
  m.cols = cols;
  return m;
}

class Decoder final : public Model {
 public:
  Decoder(const ModelConfig& config, std::unique_ptr<DecoderResources> resources,
          DecoderWeights weights)
      : config_(config),
        resources_(std::move(resources)),
        ctx_(resources_->context),
        weights_(std::move(weights)),
        weight_bytes_(weights_.arena.size()),
        device_(make_step_device(ctx_, config_)),
        cache_(device_->cache()),
        pages_(device_->pages()),
        act_dtype_(weights_.embed.format->activation_dtype(ctx_.isa)),
        numerics_fingerprint_(device_->numerics_fingerprint()),
        forward_([this](const StepInputs& in, const Mat& logits, const StepCancel* cancel) {
          return layers(in, logits, cancel);
        }) {}

  int vocab() const override { return config_.vocab; }
  int max_context() const override { return config_.max_context; }
  const std::string& fingerprint() const override { return config_.fingerprint; }
  const std::vector<CacheGroup>& groups() const override { return cache_.groups; }
  size_t weight_bytes() const override { return weight_bytes_; }
  const std::string& numerics_fingerprint() const override { return numerics_fingerprint_; }
  Context& context() override { return ctx_; }

  void reserve(const StepLimits& most) override {
    device_->reserve(most, [&](const StepLimits& padded) {
      x_.reserve(ctx_, padded.tokens, config_.hidden, DType::f32);
      h_.reserve(ctx_, padded.tokens, config_.hidden, act_dtype_);
      x_sampled_.reserve(ctx_, padded.samples, config_.hidden, DType::f32);
      for (size_t i = 0; i < config_.layers.size(); ++i) reserve_layer(i, padded);
    });
  }
  int64_t free_bytes() const override { return device_->free_bytes(); }
  PageIo& pages() override { return pages_; }
  WarmUp warm_up(const StepLimits& most, double seconds) override {
    return device_->warm_up(*this, most, seconds);
  }

  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    return batch.token_ids.empty() || device_->run(batch, logits, cancel, forward_);
  }
  StepOutputs* outputs() override { return device_->outputs(); }

  void release() noexcept override {
    if (!device_->release()) return;
    weights_.arena = Buffer();
    for (Workspace* w :
         {&x_, &h_, &qkv_, &q_, &attn_, &mid_, &scaled_, &x_sampled_, &attn_sampled_})
      *w = Workspace();
  }

 private:
  void reserve_layer(size_t i, const StepLimits& most) {
    const LayerConfig& layer = config_.layers[i];
    const LayerWeights& w = weights_.layers[i];
    const KvLayout& layout = cache_.layout_of_layer[i];
    const int64_t heads = layer.heads, width = heads * layer.v_dim;
    qkv_.reserve(ctx_, most.tokens, w.qkv.n, DType::f32);
    q_.reserve(ctx_, most.tokens, heads * layout.k_width(), attention_q_dtype(ctx_, layout.dtype));
    attn_.reserve(ctx_, most.tokens, width, act_dtype_);
    attn_sampled_.reserve(ctx_, most.samples, width, act_dtype_);
    mid_.reserve(ctx_, most.tokens, w.gate_up.n / 2, act_dtype_);
    if (layer.residual_scale != 1.0f)
      scaled_.reserve(ctx_, most.tokens, config_.hidden, DType::f32);
    w.gate_up.format->reserve(ctx_, w.gate_up, most.tokens);
  }

  // Returns false when `cancel` was requested between two layers.
  bool layers(const StepInputs& in, const Mat& logits, const StepCancel* cancel) {
    Mat x = x_.view(ctx_, in.tokens, config_.hidden, DType::f32);
    embedding(ctx_, weights_.embed, in.token_ids, config_.embed_scale, x);
    for (size_t i = 0; i < config_.layers.size(); ++i) {
      if (cancel && cancel->requested()) return false;
      // The last layer's KV is needed for every token, its output for sampled rows only.
      const bool last = i + 1 == config_.layers.size();
      Mat attn = attention_block(i, in, x, last && in.samples == 0);
      if (last && in.samples == 0) return true;
      if (last && !in.all_sampled) {
        x = gather(x, in, x_sampled_);
        attn = gather(attn, in, attn_sampled_);
      }
      add_linear(Op::attn_out, weights_.layers[i].o, attn, weights_.layers[i].o_bias, x,
                 config_.layers[i].residual_scale);
      mlp_block(i, x);
    }
    head(x, logits);
    return true;
  }

  Norm norm(const float* weight) const {
    return {weight ? NormKind::rms : NormKind::none, config_.norm_eps, config_.norm_weight_offset,
            weight};
  }

  // Norm, projection, KV write and attention. `kv_only`: this layer's output is not needed.
  Mat attention_block(size_t i, const StepInputs& in, const Mat& x, bool kv_only) {
    const LayerConfig& layer = config_.layers[i];
    const LayerWeights& w = weights_.layers[i];
    const KvLayout& layout = cache_.layout_of_layer[i];
    const int group = cache_.group_of_layer[i];
    const PageView pages = pages_.view(group);
    const SeqBatch& seqs = in.groups[group];

    const Mat h = h_.view(ctx_, x.rows, config_.hidden, act_dtype_);
    rms_norm(ctx_, norm(w.attn_norm), x, h);
    const Mat qkv = qkv_.dense_view(ctx_, x.rows, w.qkv.n, DType::f32);
    linear(ctx_, Op::qkv, w.qkv, h, qkv, {.bias = w.qkv_bias});

    AttentionShape shape;
    shape.heads = layer.heads;
    shape.kv_heads = layer.kv_heads;
    shape.k_dim = layer.k_dim;
    shape.v_dim = layer.v_dim;
    shape.scale = layer.attn_scale != 0 ? layer.attn_scale
                                        : 1.0f / std::sqrt(static_cast<float>(layer.k_dim));
    shape.softcap = layer.softcap;
    shape.window = layer.window;
    const Mat q = q_.dense_view(ctx_, x.rows, int64_t{layer.heads} * layout.k_width(),
                                attention_q_dtype(ctx_, layout.dtype));
    rope_write_kv(ctx_, shape, layout, pages, seqs, qkv, norm(w.q_norm), norm(w.k_norm),
                  layer.rope >= 0 ? in.ropes[layer.rope] : StepRope{}, q);
    const Mat out = attn_.view(ctx_, x.rows, int64_t{layer.heads} * layer.v_dim, act_dtype_);
    if (!kv_only) attention(ctx_, shape, layout, pages, seqs, q, out, attention_scratch_);
    return out;
  }

  void mlp_block(size_t i, const Mat& x) {
    const LayerConfig& layer = config_.layers[i];
    const LayerWeights& w = weights_.layers[i];
    const Mat h = h_.view(ctx_, x.rows, config_.hidden, act_dtype_);
    rms_norm(ctx_, norm(w.mlp_norm), x, h);
    const Mat mid = mid_.view(ctx_, x.rows, w.gate_up.n / 2, act_dtype_);
    linear(ctx_, Op::gate_up, w.gate_up, h, mid,
           {.bias = w.gate_up_bias, .epilogue = Epilogue::silu_mul});
    add_linear(Op::down, w.down, with_cols(mid, layer.intermediate), w.down_bias, x,
               layer.residual_scale);
  }

  // x += scale * (in W^T + bias)
  void add_linear(Op op, const LinearWeight& w, const Mat& in, const float* bias, const Mat& x,
                  float scale) {
    if (scale == 1.0f) {
      linear(ctx_, op, w, in, x, {.bias = bias, .epilogue = Epilogue::add});
      return;
    }
    const Mat out = scaled_.view(ctx_, x.rows, x.cols, DType::f32);
    linear(ctx_, op, w, in, out, {.bias = bias});
    add_scaled(ctx_, out, scale, x);
  }

  Mat gather(const Mat& m, const StepInputs& in, Workspace& workspace) {
    const Mat out = workspace.view(ctx_, in.samples, m.cols, m.dtype);
    gather_rows(ctx_, m, in.sample_rows, out);
    return out;
  }

  void head(const Mat& x, const Mat& out) {
    const Mat h = h_.view(ctx_, x.rows, config_.hidden, act_dtype_);
    rms_norm(ctx_, norm(weights_.final_norm), x, h);
    linear(ctx_, Op::head, weights_.head, h, out);
    if (config_.final_softcap != 0) soft_cap(ctx_, config_.final_softcap, out);
  }

  const ModelConfig config_;
  std::unique_ptr<DecoderResources> resources_;
  Context& ctx_;
  DecoderWeights weights_;
  const size_t weight_bytes_;
  const std::unique_ptr<StepDevice> device_;
  const CachePlan& cache_;
  DecoderPages& pages_;
  const DType act_dtype_;
  const std::string numerics_fingerprint_;
  const StepDevice::Forward forward_;
  Workspace x_, h_, qkv_, q_, attn_, mid_, scaled_, x_sampled_, attn_sampled_;
  AttentionScratch attention_scratch_;
};

}  // namespace

std::unique_ptr<Model> make_decoder(const ModelConfig& config,
                                    std::unique_ptr<DecoderResources> resources,
                                    DecoderWeights weights) {
  return std::make_unique<Decoder>(config, std::move(resources), std::move(weights));
}

}  // namespace turbomind
