// Steps on the CPU: arrays and pages in host memory, and results at the return of a step.
#include <algorithm>
#include <cstring>

#include "cache/page_codec.h"
#include "core/memory.h"
#include "model/build_hash.h"
#include "model/device/step_device.h"
#include "ops/rope.h"

namespace turbomind {

namespace {

std::vector<PageCodec> make_codecs(const CachePlan& plan) {
  std::vector<PageCodec> codecs;
  for (size_t g = 0; g < plan.groups.size(); ++g)
    codecs.emplace_back(layouts_of(plan, static_cast<int>(g)));
  return codecs;
}

class HostPages final : public DecoderPages {
 public:
  explicit HostPages(const CachePlan& plan)
      : plan_(plan), pages_(plan.groups.size()), codecs_(make_codecs(plan)) {}

  void allocate_pages(const std::vector<int64_t>& pages) override {
    for (size_t g = 0; g < pages_.size(); ++g)
      pages_[g] = HugeBuffer(static_cast<size_t>(pages[g]) * plan_.groups[g].page_bytes);
  }
  void prepare_pages(int64_t pages) override {
    for (size_t g = 0; g < pages_.size(); ++g) {
      const size_t bytes = static_cast<size_t>(pages) * plan_.groups[g].page_bytes;
      pages_[g].populate(std::min(bytes, pages_[g].size()));
    }
  }
  PageView view(int group) const override {
    return {pages_[group].data(), plan_.groups[group].page_bytes};
  }
  void copy_page(int group, int32_t src, int32_t dst) override {
    std::memcpy(page(group, dst), page(group, src), plan_.groups[group].page_bytes);
  }
  size_t stored_page_bytes(int group, int count) const override {
    return codecs_[group].bytes(count);
  }
  void read_page(int group, int32_t at, int count, uint8_t* out) const override {
    codecs_[group].read(page(group, at), count, out);
  }
  void write_page(int group, int32_t at, int count, const uint8_t* in, int stored) override {
    codecs_[group].write(page(group, at), count, in, stored);
  }

 private:
  uint8_t* page(int group, int32_t at) const {
    return pages_[group].data() + static_cast<size_t>(at) * plan_.groups[group].page_bytes;
  }

  const CachePlan& plan_;
  std::vector<HugeBuffer> pages_;
  const std::vector<PageCodec> codecs_;  // per group
};

class HostStepArrays {
 public:
  HostStepArrays(Context& ctx, const ModelConfig& config, const CachePlan& plan)
      : ctx_(ctx),
        config_(config),
        cos_(config.ropes.size()),
        sin_(config.ropes.size()),
        seqs_(plan.groups.size()) {
    inputs_.groups.resize(plan.groups.size());
    inputs_.ropes.resize(config.ropes.size());
  }

  StepInputs& set(const StepBatch& batch) {
    inputs_.tokens = static_cast<int64_t>(batch.token_ids.size());
    inputs_.samples = static_cast<int64_t>(batch.sample_rows.size());
    inputs_.token_ids = batch.token_ids.data();
    inputs_.sample_rows = batch.sample_rows.data();
    for (size_t r = 0; r < cos_.size(); ++r) set_rope(r, batch.positions);
    for (size_t g = 0; g < seqs_.size(); ++g) {
      seqs_[g].clear();
      for (const StepRow& row : batch.rows)
        seqs_[g].push_back({row.q_begin, row.q_len, row.kv_begin, row.pages[g]});
      inputs_.groups[g].seqs = seqs_[g].data();
      inputs_.groups[g].count = static_cast<int64_t>(seqs_[g].size());
    }
    return inputs_;
  }

 private:
  void set_rope(size_t r, const std::vector<int32_t>& positions) {
    const RopeTable& table = config_.ropes[r];
    const size_t n = positions.size() * table.inv_freq.size();
    cos_[r].resize(n);
    sin_[r].resize(n);
    rope_angles(ctx_, table, positions.data(), static_cast<int64_t>(positions.size()),
                cos_[r].data(), sin_[r].data());
    inputs_.ropes[r].table = &table;
    inputs_.ropes[r].cos = cos_[r].data();
    inputs_.ropes[r].sin = sin_[r].data();
  }

  Context& ctx_;
  const ModelConfig& config_;
  StepInputs inputs_;
  std::vector<std::vector<float>> cos_, sin_;
  std::vector<std::vector<AttentionSeq>> seqs_;
};

class HostStepDevice final : public StepDevice {
 public:
  HostStepDevice(Context& ctx, const ModelConfig& config)
      : ctx_(ctx),
        vocab_(config.vocab),
        cache_(plan_cache(config, true)),
        pages_(cache_),
        reads_other_kv_(config.layers.back().kv_layer >= 0),
        arrays_(ctx, config, cache_),
        sampled_arrays_(ctx, config, cache_) {}

  const CachePlan& cache() const override { return cache_; }
  std::string numerics_fingerprint() const override {
    return std::string("cpu/") + isa_name(ctx_.isa) + "/" + std::to_string(kKernelRevision) + "-" +
           build_hash();
  }
  DecoderPages& pages() override { return pages_; }
  bool run(const StepBatch& batch, float* logits, const StepCancel* cancel,
           const Forward& forward) override {
    const StepInputs& in = set(batch);
    const ThreadPool::Step step(ctx_.pool);
    return forward(in, {logits, DType::f32, in.samples, vocab_, vocab_}, cancel);
  }

 private:
  // Sets the arrays of a step and, where layers follow the last one that writes KV, those of its
  // sampled tokens alone.
  const StepInputs& set(const StepBatch& batch) {
    StepInputs& in = arrays_.set(batch);
    const bool fewer = in.samples > 0 && in.samples < in.tokens;
    in.sampled = reads_other_kv_ && fewer ? &sampled_arrays_.set(sampled_of(batch)) : nullptr;
    return in;
  }

  // Runs of sampled tokens are sequences whose earlier tokens have their KV.
  const StepBatch& sampled_of(const StepBatch& batch) {
    StepBatch& s = sampled_;
    s.token_ids.clear();
    s.positions.clear();
    s.rows.clear();
    auto row = batch.rows.begin();
    int32_t last = -1;
    for (const int32_t token : batch.sample_rows) {
      const bool follows = last >= 0 && token == last + 1 && token < row->q_begin + row->q_len;
      while (token >= row->q_begin + row->q_len) ++row;
      if (follows) {
        ++s.rows.back().q_len;
      } else {
        StepRow& run = s.rows.emplace_back(*row);
        run.q_begin = static_cast<int64_t>(s.token_ids.size());
        run.q_len = 1;
        run.kv_begin = row->kv_begin + token - row->q_begin;
      }
      s.token_ids.push_back(batch.token_ids[token]);
      s.positions.push_back(batch.positions[token]);
      last = token;
    }
    return s;
  }

  Context& ctx_;
  const int vocab_;
  const CachePlan cache_;
  HostPages pages_;
  const bool reads_other_kv_;  // in layers after the last one that writes KV
  HostStepArrays arrays_, sampled_arrays_;
  StepBatch sampled_;
};

}  // namespace

std::unique_ptr<StepDevice> make_step_device(Context& ctx, const ModelConfig& config,
                                             RankLink link) {
  if (ctx.gpu) return make_gpu_step_device(ctx, config, link);
  return std::make_unique<HostStepDevice>(ctx, config);
}

}  // namespace turbomind
