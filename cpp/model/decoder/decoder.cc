// One forward pass: embedding, blocks, norm, head. It has no branch on the device: StepDevice runs
// a step, and the ops choose their kernels.
#include "model/decoder/decoder.h"

#include "model/device/step_device.h"
#include "model/mixers/attention_mixer.h"
#include "model/mixers/experts_mixer.h"
#include "model/mixers/mlp_mixer.h"
#include "model/mixers/per_layer_mixer.h"
#include "model/parallel/rank_sums.h"
#include "model/workspace.h"
#include "ops/linear.h"
#include "ops/norm.h"
#include "ops/rows.h"

namespace turbomind {

namespace {

std::vector<size_t> page_bytes(const CachePlan& cache) {
  std::vector<size_t> bytes;
  for (const CacheGroup& group : cache.groups) bytes.push_back(group.page_bytes);
  return bytes;
}

class Decoder final : public Model {
 public:
  Decoder(const ModelConfig& config, std::unique_ptr<DecoderResources> resources,
          DecoderWeights weights, RankLink link)
      : config_(config),
        resources_(std::move(resources)),
        ctx_(resources_->context),
        weights_(std::move(weights)),
        sums_(make_rank_sums(ctx_, link)),
        device_(make_step_device(ctx_, config_, link)),
        pages_(device_->pages()),
        shared_{ctx_, config_, device_->cache(), pages_, *sums_},
        memory_{weights_.shared_bytes, {{weights_.bytes, page_bytes(device_->cache())}}},
        numerics_fingerprint_(device_->numerics_fingerprint()),
        forward_([this](const StepInputs& in, const Mat& logits, const StepCancel* cancel) {
          return layers(in, logits, cancel);
        }) {
    make_blocks();
  }

  int vocab() const override { return config_.vocab; }
  int max_context() const override { return config_.max_context; }
  const std::string& fingerprint() const override { return config_.fingerprint; }
  const std::vector<CacheGroup>& groups() const override { return shared_.cache.groups; }
  const ModelMemory& memory() const override { return memory_; }
  const std::string& numerics_fingerprint() const override { return numerics_fingerprint_; }
  Context& context() override { return ctx_; }

  void reserve(const StepLimits& most) override {
    device_->reserve(most, [&](const StepLimits& padded) {
      x_.reserve(ctx_, padded.tokens, config_.hidden, DType::f32);
      h_.reserve(ctx_, padded.tokens, config_.hidden, shared_.x_dtype(weights_.head));
      x_sampled_.reserve(ctx_, padded.samples, config_.hidden, DType::f32);
      if (per_layer_) per_layer_->reserve(padded);
      for (const Block& block : blocks_) reserve_block(block, padded);
      for (const LayerWeights& w : weights_.layers)
        mixed_sampled_.reserve(ctx_, padded.samples, w.attention.o.k,
                               shared_.x_dtype(w.attention.o));
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
    weights_.arena.reset();
    for (Workspace* w : {&x_, &h_, &attention_work_.qkv, &attention_work_.q, &attention_work_.out,
                         &mlp_work_.mid, &added_, &x_sampled_, &mixed_sampled_})
      *w = Workspace();
    experts_work_ = ExpertsWork();
    per_layer_.reset();
  }

 private:
  // One step of the residual stream: x += scale * norm(mixer(norm(x))), then x *= factor.
  struct Block {
    std::unique_ptr<Mixer> mixer;
    const float* norm;       // [hidden]; null: none
    const float* post_norm;  // null: none
    float scale;
    bool attends, writes_kv;
    const float* factor = nullptr;  // [1]; null: 1
    bool fused() const { return scale == 1.0f && !post_norm && !factor; }
  };

  void make_blocks() {
    if (config_.per_layer > 0)
      per_layer_ = std::make_unique<PerLayerInputs>(shared_, weights_.per_layer);
    for (size_t i = 0; i < config_.layers.size(); ++i) {
      const LayerWeights& w = weights_.layers[i];
      const LayerConfig& c = config_.layers[i];
      const float scale = c.residual_scale;
      const int layer = static_cast<int>(i);
      blocks_.push_back(
          {std::make_unique<AttentionMixer>(shared_, layer, w.attention, attention_work_),
           w.attn_norm, w.attn_post_norm, scale, true, c.kv_layer < 0});
      blocks_.push_back({make_mlp(layer, w), w.mlp_norm, w.mlp_post_norm, scale, false, false});
      if (per_layer_)
        blocks_.push_back(
            {std::make_unique<PerLayerMixer>(shared_, layer, w.per_layer, *per_layer_), nullptr,
             w.per_layer_post_norm, 1.0f, false, false});
      blocks_.back().factor = w.scale;
    }
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (blocks_[i].attends) last_attention_ = i;
      if (blocks_[i].writes_kv) last_kv_ = i;
    }
  }

  std::unique_ptr<Mixer> make_mlp(int layer, const LayerWeights& w) {
    const LayerConfig& c = config_.layers[layer];
    std::unique_ptr<MlpMixer> mlp;
    if (c.intermediate > 0) mlp = std::make_unique<MlpMixer>(shared_, layer, w.mlp, mlp_work_);
    if (c.experts.count == 0) return mlp;
    return std::make_unique<ExpertsMixer>(shared_, layer, w.experts, experts_work_, std::move(mlp));
  }

  void reserve_block(const Block& block, const StepLimits& most) {
    block.mixer->reserve(most);
    if (!block.fused()) added_.reserve(ctx_, most.tokens, config_.hidden, DType::f32);
  }

  // Returns false when `cancel` was requested between two layers.
  bool layers(const StepInputs& in, const Mat& logits, const StepCancel* cancel) {
    sums_->begin(in, cancel);
    Mat x = x_.view(ctx_, in.tokens, config_.hidden, DType::f32);
    shared_.embed(weights_.embed, weights_.embed_begin, in.token_ids, config_.embed_scale, x);
    if (per_layer_)
      per_layer_->compute(in, normed({nullptr, shared_.x_dtype(weights_.per_layer.projection)}, x));
    Mat h = normed(input_of(0), x);
    const StepInputs* step = &in;  // of the rows of x
    const size_t last_of_all = in.sampled ? last_kv_ : last_attention_;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const Block& block = blocks_[i];
      if (block.attends && sums_->cancelled()) return false;
      // Without sampled rows only the KV is needed, else every token up to the last KV, or up to
      // the last attention where the device has no arrays of the sampled tokens alone.
      const bool kv_only = i == last_kv_ && in.samples == 0;
      Mat mixed = block.mixer->run(*step, x, h, kv_only);
      if (kv_only) {
        sums_->end();
        return true;
      }
      if (i == last_of_all && !in.all_sampled) {
        x = gather(x, in, x_sampled_);
        mixed = gather(mixed, in, mixed_sampled_);
        if (per_layer_) per_layer_->keep_sampled(in);
        if (in.sampled) step = in.sampled;
      }
      h = add(block, mixed, x, input_of(i + 1));
    }
    head(h, logits);
    return true;
  }

  // What a block makes of x before its mixer; behind the last block, what the head does.
  struct Input {
    const float* norm;  // null: none
    DType dtype;
  };
  Input input_of(size_t block) const {
    if (block == blocks_.size()) return {weights_.final_norm, shared_.x_dtype(weights_.head)};
    return {blocks_[block].norm, blocks_[block].mixer->input_dtype()};
  }
  Mat normed(const Input& input, const Mat& x) {
    const Mat h = h_.view(ctx_, x.rows, config_.hidden, input.dtype);
    rms_norm(ctx_, shared_.norm(input.norm), x, h);
    return h;
  }

  // x += scale * norm(what the mixer makes of `mixed`), times the factor. Returns x as `next` wants
  // it.
  Mat add(const Block& block, const Mat& mixed, const Mat& x, const Input& next) {
    if (sums_->several() && block.mixer->is_partial()) return add_sum(block, mixed, x, next);
    if (block.fused()) {
      block.mixer->finish(mixed, Epilogue::add, x);
      return normed(next, x);
    }
    const Mat out = added_.view(ctx_, x.rows, x.cols, DType::f32);
    block.mixer->finish(mixed, Epilogue::store, out);
    if (block.post_norm) rms_norm(ctx_, shared_.norm(block.post_norm), out, out);
    add_scaled(ctx_, out, block.scale, x, block.factor);
    return normed(next, x);
  }

  // The same for a sum of which each rank's mixer makes a part.
  Mat add_sum(const Block& block, const Mat& mixed, const Mat& x, const Input& next) {
    block.mixer->finish(mixed, Epilogue::store, sums_->part(x.rows, x.cols));
    if (!block.post_norm && !block.factor) {
      const Mat h = h_.view(ctx_, x.rows, config_.hidden, next.dtype);
      sums_->sum({x, block.scale, true, shared_.norm(next.norm), h});
      return h;
    }
    const Mat out = added_.view(ctx_, x.rows, x.cols, DType::f32);
    sums_->sum({out, 1.0f, false, shared_.norm(block.post_norm), block.post_norm ? out : Mat{}});
    add_scaled(ctx_, out, block.scale, x, block.factor);
    return normed(next, x);
  }

  Mat gather(const Mat& m, const StepInputs& in, Workspace& workspace) {
    const Mat out = workspace.view(ctx_, in.samples, m.cols, m.dtype);
    gather_rows(ctx_, m, in.sample_rows, out);
    return out;
  }

  void head(const Mat& h, const Mat& logits) {
    const LinearWeight& w = weights_.head;
    const RankSums::Columns to = sums_->columns(logits, weights_.head_begin, w.n);
    if (w.n > 0) {  // not a rank without a part of the vocabulary
      linear(ctx_, Op::head, w, h, to.y, {.part = to.part, .first_col = to.first_col});
      if (config_.logit_scale != 1.0f || config_.final_softcap != 0) {
        const Mat own{to.y.f32(0) + to.first_col, to.y.dtype, to.y.rows, w.n, to.y.stride};
        scale_and_cap(ctx_, config_.logit_scale, config_.final_softcap, own);
      }
    }
    sums_->join_columns(logits);
  }

  const ModelConfig config_;
  std::unique_ptr<DecoderResources> resources_;
  Context& ctx_;
  DecoderWeights weights_;
  const std::unique_ptr<RankSums> sums_;
  const std::unique_ptr<StepDevice> device_;
  DecoderPages& pages_;
  const MixerContext shared_;
  const ModelMemory memory_;
  const std::string numerics_fingerprint_;
  const StepDevice::Forward forward_;
  Workspace x_, h_, added_, x_sampled_, mixed_sampled_;
  AttentionWork attention_work_;
  MlpWork mlp_work_;
  ExpertsWork experts_work_;
  std::unique_ptr<PerLayerInputs> per_layer_;  // null: none
  std::vector<Block> blocks_;
  size_t last_attention_ = 0;  // block
  size_t last_kv_ = 0;         // the last block that writes KV
};

}  // namespace

std::unique_ptr<Model> make_decoder(const ModelConfig& config,
                                    std::unique_ptr<DecoderResources> resources,
                                    DecoderWeights weights, RankLink link) {
  return std::make_unique<Decoder>(config, std::move(resources), std::move(weights), link);
}

}  // namespace turbomind
