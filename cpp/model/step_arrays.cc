#include "model/step_arrays.h"

#include "model/device/device_step_arrays.h"
#include "ops/rope.h"

namespace turbomind {

namespace {

class HostStepArrays final : public StepArrays {
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

  const StepInputs& set(const StepBatch& batch, const int32_t*) override {
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

}  // namespace

std::unique_ptr<StepArrays> make_step_arrays(Context& ctx, const ModelConfig& config,
                                             const CachePlan& plan) {
  if (ctx.gpu) return make_device_step_arrays(*ctx.gpu, config, plan);
  return std::make_unique<HostStepArrays>(ctx, config, plan);
}

}  // namespace turbomind
