// One forward pass: embedding, layers, norm, head.
#include "model/decoder.h"

#include <cmath>

#include "core/error.h"
#include "cuda/device_or_host_buffer.h"
#include "model/decoder_impl.h"
#include "model/device/device_limits.h"
#include "model/device/device_logprobs.h"
#include "model/device/device_sampler.h"
#include "model/device/device_step_arrays.h"
#include "model/device/device_warm_up.h"
#include "model/device/step_graphs.h"
#include "model/page_io.h"
#include "model/step_arrays.h"
#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/norm.h"
#include "ops/rope.h"
#include "ops/rows.h"

namespace turbomind {

namespace {

// Raised by every change after which some kernel gives other bits for the same input: pages that an
// older build stored are then known as not bit-equal to fresh ones.
constexpr int kKernelRevision = 1;

// A matrix whose memory only grows, so a steady state allocates nothing.
class Workspace {
 public:
  Mat view(const Context& ctx, int64_t rows, int64_t cols, DType dtype) {
    const size_t bytes = bytes_of(ctx, rows, cols, dtype);
    if (bytes > buffer_.size()) grow(ctx, bytes + bytes / 2);
    return {buffer_.data(), dtype, rows, cols, stride_of(ctx, cols)};
  }
  void reserve(const Context& ctx, int64_t rows, int64_t cols, DType dtype) {
    const size_t bytes = bytes_of(ctx, rows, cols, dtype);
    if (bytes > buffer_.size()) grow(ctx, bytes);
  }

 private:
  static int64_t stride_of(const Context& ctx, int64_t cols) {
    return ctx.gpu ? padded_cols(cols) : activation_stride(cols);
  }
  static size_t bytes_of(const Context& ctx, int64_t rows, int64_t cols, DType dtype) {
    return static_cast<size_t>(rows) * stride_of(ctx, cols) * dtype_bytes(dtype);
  }
  void grow(const Context& ctx, size_t bytes) {
    if (ctx.gpu) {
      ctx.gpu->stream().synchronize();
      ctx.gpu->moved();
    }
    buffer_ = Buffer();  // the old one goes first
    buffer_ = Buffer(ctx, bytes);
    // Padding behind a row's columns that no kernel writes meets weights of zero: no NaN there.
    if (ctx.gpu) ctx.gpu->gpu().fill(ctx.gpu->handle(), buffer_.data(), 0, bytes);
  }

  Buffer buffer_;
};

// What `linear` takes: the weight's own type on a GPU; on the CPU bfloat16 where the instruction
// set multiplies it.
DType activation_dtype(const ModelConfig& config, const Context& ctx) {
  if (ctx.gpu) return config.weight_format == "float16" ? DType::f16 : DType::bf16;
  return config.weight_format == "bfloat16" && isa_has_bf16_dot(ctx.isa) ? DType::bf16 : DType::f32;
}

std::string numerics_of(const Context& ctx) {
  const std::string revision = "/" + std::to_string(kKernelRevision);
  if (!ctx.gpu) return std::string("cpu/") + isa_name(ctx.isa) + revision;
  const GpuInfo& info = ctx.gpu->gpu().info();
  const size_t library = ctx.gpu->library_version();  // another one may choose other algorithms
  return std::string(gpu_kind_name(ctx.gpu->kind())) + "/sm_" + std::to_string(info.major) +
         std::to_string(info.minor) + (ctx.gpu->deterministic() ? "/deterministic" : "") +
         (library > 0 ? "/cublaslt_" + std::to_string(library) : "") + revision;
}

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
        cache_(plan_cache(config, !ctx_.gpu)),
        act_dtype_(activation_dtype(config, ctx_)),
        arrays_(make_step_arrays(ctx_, config_, cache_)),
        pages_(make_page_io(ctx_, cache_)),
        numerics_fingerprint_(numerics_of(ctx_)) {
    if (!ctx_.gpu) return;
    graphs_ = std::make_unique<StepGraphs>(*ctx_.gpu);
    sampler_ = std::make_unique<DeviceSampler>(*ctx_.gpu);
    logprobs_ = std::make_unique<LogprobReader>(*ctx_.gpu);
  }

  int vocab() const override { return config_.vocab; }
  int max_context() const override { return config_.max_context; }
  const std::string& fingerprint() const override { return config_.fingerprint; }
  const std::vector<CacheGroup>& groups() const override { return cache_.groups; }
  size_t weight_bytes() const override { return weight_bytes_; }
  Context& context() override { return ctx_; }

  // As far as memory of a GPU goes.
  void reserve(const StepLimits& most) override {
    if (!ctx_.gpu) return;
    const int64_t rows = row_bucket(static_cast<int>(most.rows));  // steps of a token each
    const int64_t tokens = std::max(most.tokens, rows), samples = std::max(most.samples, rows);
    const StepLimits padded{tokens, rows, samples, most.keys, std::max(most.draws, rows)};
    check_device_steps(padded);
    x_.reserve(ctx_, tokens, config_.hidden, DType::f32);
    h_.reserve(ctx_, tokens, config_.hidden, act_dtype_);
    x_sampled_.reserve(ctx_, samples, config_.hidden, DType::f32);
    logits_.reserve(ctx_, samples, config_.vocab, DType::f32);
    for (size_t i = 0; i < config_.layers.size(); ++i) reserve_layer(i, padded);
    ctx_.gpu->attention_workspace(attention_workspace_bytes(config_, *ctx_.gpu, padded));
    arrays_->reserve(padded);
    sampler_->reserve(padded.draws);
    logprobs_->reserve(padded.draws, std::min<int64_t>(kMostTopTokens, config_.vocab));
    ctx_.gpu->stream().synchronize();
  }
  int64_t free_bytes() const override {
    return ctx_.gpu ? static_cast<int64_t>(ctx_.gpu->gpu().free_bytes()) : 0;
  }

  void allocate_pages(int64_t pages) override { pages_->allocate(pages); }
  WarmUp warm_up(const StepLimits& most, double seconds) override {
    return ctx_.gpu ? warm_up_device(*this, *ctx_.gpu, most, seconds) : WarmUp{};
  }
  void prepare_pages(int64_t pages) override { pages_->prepare(pages); }
  void copy_page(int group, int32_t src, int32_t dst) override { pages_->copy(group, src, dst); }

  const std::string& numerics_fingerprint() const override { return numerics_fingerprint_; }
  size_t stored_page_bytes(int group, int count) const override {
    return pages_->stored_bytes(group, count);
  }
  void read_page(int group, int32_t page, int count, uint8_t* out) const override {
    pages_->read(group, page, count, out);
  }
  void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) override {
    pages_->write(group, page, count, in, stored);
  }
  void read_pages(const std::vector<PageTransfer>& transfers) const override {
    page_batch() > 1 ? pages_->read_all(transfers) : Model::read_pages(transfers);
  }
  void write_pages(const std::vector<PageTransfer>& transfers) override {
    page_batch() > 1 ? pages_->write_all(transfers) : Model::write_pages(transfers);
  }
  int page_batch() const override { return pages_->batch(); }
  HostMemory host_memory() const override { return pages_->host_memory(); }

  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    if (batch.token_ids.empty()) return true;
    if (!ctx_.gpu) {
      const StepInputs& in = arrays_->set(batch, nullptr);
      const Mat out{logits, DType::f32, in.samples, config_.vocab, config_.vocab};
      return layers(in, out, cancel);
    }
    if (cancel && cancel->requested()) return false;
    const StepInputs& in = arrays_->set(batch, sampler_->drawn());
    const Mat out = logits_.view(ctx_, in.samples, config_.vocab, DType::f32);
    device_rows_ = out;
    const auto submit = [&] { layers(in, out, nullptr); };
    if (ctx_.profiler.enabled)  // events between ops are none of a graph's
      submit();
    else
      graphs_->run(arrays_->key(), submit);
    if (logits) read_logits(0, static_cast<int64_t>(batch.sample_rows.size()), logits);
    return true;
  }

  bool asynchronous() const override { return ctx_.gpu != nullptr; }

  void submit_sample(const DeviceSampleRow* rows, int64_t count) override {
    const double bytes = static_cast<double>(count) * config_.vocab * sizeof(float);
    const ProfileScope profile(ctx_.profiler, Op::sample, bytes, 0, ctx_.profiler.device);
    sampler_->submit(device_rows_, config_.vocab, rows, count);
  }
  void read_tokens(int32_t* tokens) override { sampler_->read(tokens); }

  void submit_logprobs(const DeviceLogprobRow* rows, int64_t count) override {
    const double bytes = static_cast<double>(count) * config_.vocab * sizeof(float);
    const ProfileScope profile(ctx_.profiler, Op::sample, bytes, 0, ctx_.profiler.device);
    logprobs_->submit(device_rows_, config_.vocab, sampler_->drawn(), rows, count);
  }
  void read_logprobs(DeviceLogprob* out) override { logprobs_->read(out); }

  void abandon_steps() noexcept override {
    if (!ctx_.gpu) return;
    try {
      ctx_.gpu->stream().synchronize();
    } catch (const std::exception&) {  // the next step will tell
    }
    sampler_->forget();
    logprobs_->forget();
  }

  void read_logits(int64_t first, int64_t count, float* out) override {
    for (int64_t r = 0; r < count; ++r)
      ctx_.gpu->gpu().copy(ctx_.gpu->handle(), out + r * config_.vocab, device_rows_.f32(first + r),
                           config_.vocab * sizeof(float));
    ctx_.gpu->stream().synchronize();
  }

  void give_back() noexcept override {
    if (!ctx_.gpu) return;
    abandon_steps();
    graphs_.reset();
    sampler_->give_back();
    logprobs_->give_back();
    pages_->allocate(0);
    weights_.arena = Buffer();
    for (Workspace* w :
         {&x_, &h_, &qkv_, &q_, &attn_, &mid_, &scaled_, &x_sampled_, &attn_sampled_, &logits_})
      *w = Workspace();
    ctx_.gpu->give_back();
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
    ctx_.gpu->linear(most.tokens, w.gate_up.n);
  }

  // False when `cancel` was requested between two layers.
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

  // Norm, projection, KV write and attention. `kv_only`: nobody reads this layer's output.
  Mat attention_block(size_t i, const StepInputs& in, const Mat& x, bool kv_only) {
    const LayerConfig& layer = config_.layers[i];
    const LayerWeights& w = weights_.layers[i];
    const KvLayout& layout = cache_.layout_of_layer[i];
    const int group = cache_.group_of_layer[i];
    const PageView pages = pages_->view(group);
    const SeqBatch& seqs = in.groups[group];

    const Mat h = h_.view(ctx_, x.rows, config_.hidden, act_dtype_);
    rms_norm(ctx_, norm(w.attn_norm), x, h);
    const Mat qkv = dense(qkv_.view(ctx_, x.rows, w.qkv.n, DType::f32));
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
    const Mat q = dense(q_.view(ctx_, x.rows, int64_t{layer.heads} * layout.k_width(),
                                attention_q_dtype(ctx_, layout.dtype)));
    rope_write_kv(ctx_, shape, layout, pages, seqs, qkv, norm(w.q_norm), norm(w.k_norm),
                  layer.rope >= 0 ? in.ropes[layer.rope] : StepRope{}, q);
    const Mat out = attn_.view(ctx_, x.rows, int64_t{layer.heads} * layer.v_dim, act_dtype_);
    if (!kv_only) attention(ctx_, shape, layout, pages, seqs, q, out, attention_scratch_);
    return out;
  }

  // A GPU's kernels want these without padding.
  Mat dense(Mat m) const {
    if (ctx_.gpu) m.stride = m.cols;
    return m;
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
  const CachePlan cache_;
  const DType act_dtype_;
  const std::unique_ptr<StepArrays> arrays_;
  const std::unique_ptr<PageIo> pages_;
  const std::string numerics_fingerprint_;
  Workspace x_, h_, qkv_, q_, attn_, mid_, scaled_, x_sampled_, attn_sampled_, logits_;
  std::unique_ptr<StepGraphs> graphs_;       // with a GPU
  std::unique_ptr<DeviceSampler> sampler_;   // with a GPU
  std::unique_ptr<LogprobReader> logprobs_;  // with a GPU
  Mat device_rows_;                          // logits of the last step, in device memory
  AttentionScratch attention_scratch_;
};

}  // namespace

std::unique_ptr<Model> make_decoder(const ModelConfig& config,
                                    std::unique_ptr<DecoderResources> resources,
                                    DecoderWeights weights) {
  return std::make_unique<Decoder>(config, std::move(resources), std::move(weights));
}

}  // namespace turbomind
