// One forward pass: embedding, layers, norm, head.
#include "model/decoder.h"

#include <cmath>
#include <cstring>

#include "cache/page_codec.h"
#include "core/error.h"
#include "model/decoder_impl.h"
#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/norm.h"
#include "ops/rope.h"

namespace turbomind {

namespace {

// Raised by every change after which some kernel gives other bits for the same input: pages that an
// older build stored are then known as not bit-equal to fresh ones.
constexpr int kKernelRevision = 1;

// A matrix whose memory only grows, so a steady state allocates nothing.
class Workspace {
 public:
  Mat view(int64_t rows, int64_t cols, DType dtype) {
    const int64_t stride = activation_stride(cols);
    const size_t bytes = static_cast<size_t>(rows) * stride * dtype_bytes(dtype);
    if (bytes > buffer_.size()) buffer_ = HugeBuffer(bytes + bytes / 2);
    return {buffer_.data(), dtype, rows, cols, stride};
  }

 private:
  HugeBuffer buffer_;
};

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
        cache_(plan_cache(config)),
        act_dtype_(config.weight_format == "bfloat16" && isa_has_bf16_dot(ctx_.isa) ? DType::bf16
                                                                                    : DType::f32),
        rope_cos_(config.ropes.size()),
        rope_sin_(config.ropes.size()),
        group_seqs_(cache_.groups.size()),
        pages_(cache_.groups.size()),
        codecs_(make_codecs(cache_)),
        numerics_id_(std::string("cpu/") + isa_name(ctx_.isa) + "/" +
                     std::to_string(kKernelRevision)) {}

  int vocab() const override { return config_.vocab; }
  int max_context() const override { return config_.max_context; }
  const std::string& fingerprint() const override { return config_.fingerprint; }
  const std::vector<CacheGroup>& groups() const override { return cache_.groups; }
  size_t weight_bytes() const override { return weights_.arena.size(); }
  Context& context() override { return ctx_; }

  void allocate_pages(int64_t pages) override {
    for (size_t g = 0; g < pages_.size(); ++g)
      pages_[g] = HugeBuffer(static_cast<size_t>(pages) * cache_.groups[g].page_bytes);
  }
  void prepare_pages(int64_t pages) override {
    for (size_t g = 0; g < pages_.size(); ++g)
      pages_[g].populate(static_cast<size_t>(pages) * cache_.groups[g].page_bytes);
  }
  void copy_page(int group, int32_t src, int32_t dst) override {
    std::memcpy(page_data(group, dst), page_data(group, src), cache_.groups[group].page_bytes);
  }

  const std::string& numerics_id() const override { return numerics_id_; }
  size_t stored_page_bytes(int group, int count) const override {
    return codecs_[group].bytes(count);
  }
  void read_page(int group, int32_t page, int count, uint8_t* out) const override {
    codecs_[group].read(page_data(group, page), count, out);
  }
  void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) override {
    codecs_[group].write(page_data(group, page), count, in, stored);
  }

  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    const int64_t tokens = static_cast<int64_t>(batch.token_ids.size());
    if (tokens == 0) return true;
    prepare(batch, tokens);
    Mat x = x_.view(tokens, config_.hidden, DType::f32);
    embedding(ctx_, weights_.embed, batch.token_ids.data(), config_.embed_scale, x);
    for (size_t i = 0; i < config_.layers.size(); ++i) {
      if (cancel && cancel->requested()) return false;
      // The last layer's KV is needed for every token, its output for sampled rows only.
      const bool last = i + 1 == config_.layers.size();
      Mat attn = attention_block(i, x, last && batch.sample_rows.empty());
      if (last) {
        if (batch.sample_rows.empty()) return true;
        x = gather(x, batch.sample_rows, x_sampled_);
        attn = gather(attn, batch.sample_rows, attn_sampled_);
      }
      add_linear(Op::attn_out, weights_.layers[i].o, attn, weights_.layers[i].o_bias, x,
                 config_.layers[i].residual_scale);
      mlp_block(i, x);
    }
    head(x, logits);
    return true;
  }

 private:
  static std::vector<PageCodec> make_codecs(const CachePlan& plan) {
    std::vector<std::vector<KvLayout>> layouts(plan.groups.size());
    for (size_t i = 0; i < plan.layout_of_layer.size(); ++i)
      layouts[plan.group_of_layer[i]].push_back(plan.layout_of_layer[i]);
    return {layouts.begin(), layouts.end()};
  }

  uint8_t* page_data(int group, int32_t page) const {
    return pages_[group].data() + static_cast<size_t>(page) * cache_.groups[group].page_bytes;
  }

  Norm norm(const float* weight) const {
    return {weight ? NormKind::rms : NormKind::none, config_.norm_eps, config_.norm_weight_offset,
            weight};
  }

  // Rope angles and the sequences as each cache group sees them, once per step.
  void prepare(const StepBatch& batch, int64_t tokens) {
    for (size_t r = 0; r < config_.ropes.size(); ++r) {
      const size_t n = tokens * config_.ropes[r].inv_freq.size();
      rope_cos_[r].resize(n);
      rope_sin_[r].resize(n);
      rope_angles(ctx_, config_.ropes[r], batch.positions.data(), tokens, rope_cos_[r].data(),
                  rope_sin_[r].data());
    }
    for (size_t g = 0; g < group_seqs_.size(); ++g) {
      group_seqs_[g].clear();
      for (const StepRow& row : batch.rows)
        group_seqs_[g].push_back({row.q_begin, row.q_len, row.kv_begin, row.pages[g]});
    }
  }

  // Norm, projection, KV write and attention. `kv_only`: nobody reads this layer's output.
  Mat attention_block(size_t i, const Mat& x, bool kv_only) {
    const LayerConfig& layer = config_.layers[i];
    const LayerWeights& w = weights_.layers[i];
    const KvLayout& layout = cache_.layout_of_layer[i];
    const int group = cache_.group_of_layer[i];
    const PageView pages{pages_[group].data(), cache_.groups[group].page_bytes};
    const auto& seqs = group_seqs_[group];

    const Mat h = h_.view(x.rows, config_.hidden, act_dtype_);
    rms_norm(ctx_, norm(w.attn_norm), x, h);
    const Mat qkv = qkv_.view(x.rows, w.qkv.n, DType::f32);
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
    const Mat q = q_.view(x.rows, int64_t{layer.heads} * layout.k_width(),
                          attention_q_dtype(ctx_.isa, layout.dtype));
    const bool rotated = layer.rope >= 0;
    rope_write_kv(ctx_, shape, layout, pages, seqs.data(), static_cast<int64_t>(seqs.size()), qkv,
                  norm(w.q_norm), norm(w.k_norm), rotated ? &config_.ropes[layer.rope] : nullptr,
                  rotated ? rope_cos_[layer.rope].data() : nullptr,
                  rotated ? rope_sin_[layer.rope].data() : nullptr, q);
    const Mat out = attn_.view(x.rows, int64_t{layer.heads} * layer.v_dim, act_dtype_);
    if (!kv_only)
      attention(ctx_, shape, layout, pages, seqs.data(), static_cast<int64_t>(seqs.size()), q, out,
                attention_scratch_);
    return out;
  }

  void mlp_block(size_t i, const Mat& x) {
    const LayerConfig& layer = config_.layers[i];
    const LayerWeights& w = weights_.layers[i];
    const Mat h = h_.view(x.rows, config_.hidden, act_dtype_);
    rms_norm(ctx_, norm(w.mlp_norm), x, h);
    const Mat mid = mid_.view(x.rows, w.gate_up.n / 2, act_dtype_);
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
    const Mat out = scaled_.view(x.rows, x.cols, DType::f32);
    linear(ctx_, op, w, in, out, {.bias = bias});
    ctx_.pool.parallel_for(x.rows, 16, [&](int64_t b, int64_t e, int) {
      for (int64_t r = b; r < e; ++r)
        for (int64_t c = 0; c < x.cols; ++c) x.f32(r)[c] += scale * out.f32(r)[c];
    });
  }

  Mat gather(const Mat& m, const std::vector<int32_t>& rows, Workspace& workspace) {
    const Mat out = workspace.view(static_cast<int64_t>(rows.size()), m.cols, m.dtype);
    const size_t row_bytes = out.stride * dtype_bytes(m.dtype);
    for (size_t i = 0; i < rows.size(); ++i)
      std::memcpy(out.row<uint8_t>(0) + i * row_bytes, m.row<uint8_t>(0) + rows[i] * row_bytes,
                  row_bytes);
    return out;
  }

  void head(const Mat& x, float* logits) {
    const Mat h = h_.view(x.rows, config_.hidden, act_dtype_);
    rms_norm(ctx_, norm(weights_.final_norm), x, h);
    const Mat out{logits, DType::f32, x.rows, config_.vocab, config_.vocab};
    linear(ctx_, Op::head, weights_.head, h, out);
    if (config_.final_softcap == 0) return;
    const float cap = config_.final_softcap;
    ctx_.pool.parallel_for(x.rows * config_.vocab, 1 << 14, [&](int64_t b, int64_t e, int) {
      for (int64_t i = b; i < e; ++i) logits[i] = cap * std::tanh(logits[i] / cap);
    });
  }

  const ModelConfig config_;
  std::unique_ptr<DecoderResources> resources_;
  Context& ctx_;
  DecoderWeights weights_;
  const CachePlan cache_;
  const DType act_dtype_;
  std::vector<std::vector<float>> rope_cos_, rope_sin_;
  std::vector<std::vector<AttentionSeq>> group_seqs_;
  std::vector<HugeBuffer> pages_;
  const std::vector<PageCodec> codecs_;  // per group
  const std::string numerics_id_;
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
