// Ranks on GPUs. A host thread submits each rank's part of a step; the ranks' kernels wait for each
// other (model/parallel/gpu_exchange.h).
#include <algorithm>
#include <exception>
#include <utility>

#include "core/error.h"
#include "cuda/gpu_context.h"
#include "model/decoder/rank_group.h"
#include "model/device/device_step_arrays.h"
#include "model/device/device_warm_up.h"
#include "model/parallel/cut.h"
#include "model/parallel/gpu_exchange.h"

namespace turbomind {

namespace {

class GpuRankGroup final : public RankGroup, public StepOutputs {
 public:
  GpuRankGroup(std::vector<std::unique_ptr<Model>> ranks, std::unique_ptr<GpuExchange> exchange)
      : RankGroup(std::move(ranks)), exchange_(std::move(exchange)) {}
  ~GpuRankGroup() override { exchange_->drain(); }

  void reserve(const StepLimits& most) override {
    const StepLimits padded = padded_limits(most);
    exchange_->reserve(padded.tokens, padded.samples);
    RankGroup::reserve(most);
    most_sampled_ = padded.sampled;
  }

  // What the ranks can have together while all of them have as much.
  int64_t free_bytes() const override {
    int64_t least = rank(0).free_bytes();
    for (int r = 1; r < size(); ++r) least = std::min(least, rank(r).free_bytes());
    return exchange_->one_gpu() ? least : least * size();
  }
  WarmUp warm_up(const StepLimits& most, double seconds) override {
    return warm_up_device(*this, *context().gpu, most, seconds);
  }

  // The ranks must agree whether a step runs, so nobody else looks at `cancel`.
  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    if (cancel && cancel->requested()) return false;
    if (batch.token_ids.empty()) return true;
    reserve_for(batch);
    exchange_->begin_step(launch_kind(batch, context().gpu->library() != nullptr, profiled()));
    try {
      run([&](int r) { rank(r).forward(batch, r == 0 ? logits : nullptr, nullptr); },
          [&] { exchange_->fail(); });
    } catch (...) {
      unread_error_ = exchange_->drain();  // a step that has begun does not end any more
      exchange_->forget_kinds();
      throw;
    }
    if (logits) check();
    return true;
  }
  StepOutputs* outputs() override { return this; }

  void submit_sample(const SampleRow* rows, int64_t count) override {
    if (count > most_sampled_) {  // memory that other ranks read may move
      unread_error_ = exchange_->drain();
      most_sampled_ = count;
    }
    of_first().submit_sample(rows, count);
  }
  void submit_logprobs(const LogprobRow* rows, int64_t count) override {
    of_first().submit_logprobs(rows, count);
  }
  void read_tokens(int32_t* tokens) override {
    of_first().read_tokens(tokens);
    check();
  }
  void read_logprobs(Logprob* out) override {
    of_first().read_logprobs(out);
    check();
  }
  void read_logits(int64_t first, int64_t count, float* out) override {
    of_first().read_logits(first, count, out);
    check();
  }
  void abandon_steps() noexcept override {
    exchange_->drain();
    unread_error_ = nullptr;
    of_first().abandon_steps();
  }

  void release() noexcept override {
    exchange_->release();
    RankGroup::release();
  }

 private:
  StepOutputs& of_first() const { return *first().outputs(); }

  bool profiled() const {
    for (int r = 0; r < size(); ++r)
      if (rank(r).context().profiler.enabled) return true;
    return false;
  }

  // Throws the error of a step whose results were read.
  void check() {
    if (unread_error_) std::rethrow_exception(std::exchange(unread_error_, nullptr));
    exchange_->check();
  }

  // Steps within the limits of reserve() have their memory.
  void reserve_for(const StepBatch& batch) {
    const StepLimits padded = padded_limits({static_cast<int64_t>(batch.token_ids.size()),
                                             static_cast<int64_t>(batch.rows.size()),
                                             static_cast<int64_t>(batch.sample_rows.size())});
    exchange_->reserve(padded.tokens, padded.samples);
  }

  const std::unique_ptr<GpuExchange> exchange_;
  int64_t most_sampled_ = 0;
  std::exception_ptr unread_error_;  // of steps that were waited for before they were read
};

}  // namespace

std::unique_ptr<Model> make_gpu_rank_group(const ModelConfig& whole,
                                           std::vector<std::unique_ptr<DecoderResources>> resources,
                                           std::vector<DecoderWeights> weights) {
  const int count = static_cast<int>(weights.size());
  std::vector<GpuContext*> gpus;
  std::vector<RowRange> vocabulary;
  for (int r = 0; r < count; ++r) {
    gpus.push_back(resources[r]->gpu.get());
    vocabulary.push_back(vocabulary_part(whole.vocab, {r, count}));
  }
  const int64_t per_layer = int64_t{whole.per_layer} * static_cast<int64_t>(whole.layers.size());
  auto exchange =
      std::make_unique<GpuExchange>(gpus, std::max<int64_t>(whole.hidden, per_layer), vocabulary);
  std::vector<std::unique_ptr<Model>> ranks;
  for (int r = 0; r < count; ++r)
    ranks.push_back(make_decoder(config_of(whole, {r, count}), std::move(resources[r]),
                                 std::move(weights[r]), {nullptr, exchange.get(), r}));
  return std::make_unique<GpuRankGroup>(std::move(ranks), std::move(exchange));
}

}  // namespace turbomind
