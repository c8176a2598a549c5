// Steps on a GPU: they are submitted to the context's stream, and their results are read later.
#include <algorithm>
#include <exception>

#include "core/error.h"
#include "cuda/gpu_context.h"
#include "model/build_hash.h"
#include "model/device/device_limits.h"
#include "model/device/device_logprobs.h"
#include "model/device/device_pages.h"
#include "model/device/device_sampler.h"
#include "model/device/device_step_arrays.h"
#include "model/device/device_warm_up.h"
#include "model/device/step_device.h"
#include "model/device/step_graphs.h"
#include "model/parallel/gpu_exchange.h"
#include "model/workspace.h"
#include "ops/attention_cuda.h"

#ifndef TM_NVCC_VERSION
#define TM_NVCC_VERSION "none"
#endif

namespace turbomind {

namespace {

class GpuStepDevice final : public StepDevice, public StepOutputs {
 public:
  GpuStepDevice(Context& ctx, const ModelConfig& config, RankLink link)
      : ctx_(ctx),
        ranks_(link.gpu),
        rank_(link.rank),
        gpu_(*ctx.gpu),
        config_(config),
        cache_(plan_cache(config, false)),
        arrays_(make_device_step_arrays(ctx, config, cache_)),
        pages_(make_device_pages(gpu_, cache_)),
        graphs_(std::make_unique<StepGraphs>(gpu_)),
        sampler_(gpu_),
        logprobs_(gpu_),
        // To make a graph may wait for the GPU, so no rank launches one before all have theirs.
        captured_([this] {
          if (ranks_) ranks_->meet_hosts(rank_, ctx_.pool);
        }) {}

  const CachePlan& cache() const override { return cache_; }
  DecoderPages& pages() override { return *pages_; }
  StepOutputs* outputs() override { return this; }

  // The version of cuBLASLt counts, since another one may choose other algorithms.
  std::string numerics_fingerprint() const override {
    const GpuInfo& info = gpu_.gpu().info();
    const size_t library = gpu_.library_version();
    return std::string(gpu_kind_name(gpu_.kind())) + "/sm_" + std::to_string(info.major) +
           std::to_string(info.minor) + (gpu_.deterministic() ? "/deterministic" : "") +
           (library > 0 ? "/cublaslt_" + std::to_string(library) : "") + "/" +
           std::to_string(kKernelRevision) + "-" + build_hash() +
           (gpu_.gpu().kind() == GpuKind::cuda ? "-nvcc_" TM_NVCC_VERSION : "");
  }

  void reserve(const StepLimits& most,
               const std::function<void(const StepLimits&)>& workspaces) override {
    const StepLimits padded = padded_limits(most);
    check_device_steps(padded);
    workspaces(padded);
    attention_workspace(gpu_, attention_workspace_bytes(config_, gpu_, padded));
    arrays_->reserve(padded);
    if (samples()) reserve_samples(padded);
    gpu_.stream().synchronize();
  }
  void reserve_samples(const StepLimits& padded) {
    logits_.reserve(ctx_, padded.samples, config_.vocab, DType::f32);
    sampler_.reserve(padded.sampled);
    logprobs_.reserve(padded.sampled, std::min<int64_t>(kMostTopTokens, config_.vocab));
  }

  int64_t free_bytes() const override { return static_cast<int64_t>(gpu_.gpu().free_bytes()); }

  WarmUp warm_up(Model& model, const StepLimits& most, double seconds) override {
    return warm_up_device(model, gpu_, most, seconds);
  }

  bool run(const StepBatch& batch, float* logits, const StepCancel* cancel,
           const Forward& forward) override {
    if (cancel && cancel->requested()) return false;
    const StepInputs& in = set(batch);
    const Mat out = samples() ? logits_.view(ctx_, in.samples, config_.vocab, DType::f32)
                              : Mat{nullptr, DType::f32, in.samples, config_.vocab, config_.vocab};
    step_logits_ = out;
    const auto submit = [&] { forward(in, out, nullptr); };
    // Events between ops cannot be captured, nor what several ranks put into one stream.
    if (ranks_ ? !ranks_->captures() : ctx_.profiler.enabled)
      submit();
    else
      graphs_->run(arrays_->key(), submit, ranks_ && ranks_->hosts_wait(), captured_);
    if (logits) read_logits(0, static_cast<int64_t>(batch.sample_rows.size()), logits);
    return true;
  }

  void submit_sample(const SampleRow* rows, int64_t count) override {
    const ProfileScope profile = profile_rows(count);
    sampler_.submit(step_logits_, config_.vocab, rows, count);
    if (ranks_)
      ranks_->set_sampled(count > 0 ? sampler_.pinned_tokens() : nullptr, sampler_.done());
  }
  void read_tokens(int32_t* tokens) override { sampler_.read(tokens); }

  void submit_logprobs(const LogprobRow* rows, int64_t count) override {
    const ProfileScope profile = profile_rows(count);
    logprobs_.submit(step_logits_, config_.vocab, sampler_.sampled(), rows, count);
  }
  void read_logprobs(Logprob* out) override { logprobs_.read(out); }

  void read_logits(int64_t first, int64_t count, float* out) override {
    for (int64_t r = 0; r < count; ++r)
      gpu_.gpu().copy(gpu_.handle(), out + r * config_.vocab, step_logits_.f32(first + r),
                      config_.vocab * sizeof(float));
    gpu_.stream().synchronize();
  }

  void abandon_steps() noexcept override {
    try {
      gpu_.stream().synchronize();
    } catch (const std::exception&) {  // the next step reports it
    }
    sampler_.discard();
    logprobs_.discard();
  }

  bool release() noexcept override {
    abandon_steps();
    graphs_.reset();
    sampler_.release();
    logprobs_.release();
    pages_->allocate_pages({});
    logits_ = Workspace();
    gpu_.release();
    return true;
  }

 private:
  // Whether the logits come here: to the first rank.
  bool samples() const { return rank_ == 0; }

  const StepInputs& set(const StepBatch& batch) {
    const int32_t* sampled = samples() ? sampler_.sampled() : nullptr;
    if (!samples() && !batch.token_from.empty()) sampled = ranks_->sampled(rank_);
    return arrays_->set(batch, sampled, ranks_ ? ranks_->first_count() : 0);
  }

  ProfileScope profile_rows(int64_t count) const {
    const double bytes = static_cast<double>(count) * config_.vocab * sizeof(float);
    return ProfileScope(ctx_.profiler, Op::sample, bytes, 0, ctx_.profiler.device);
  }

  Context& ctx_;
  GpuExchange* const ranks_;  // null: one rank
  const int rank_;
  GpuContext& gpu_;
  const ModelConfig& config_;
  const CachePlan cache_;
  const std::unique_ptr<DeviceStepArrays> arrays_;
  const std::unique_ptr<DecoderPages> pages_;
  std::unique_ptr<StepGraphs> graphs_;
  DeviceSampler sampler_;
  LogprobReader logprobs_;
  const std::function<void()> captured_;  // see StepGraphs::run
  Workspace logits_;
  Mat step_logits_;  // of the last step
};

}  // namespace

std::unique_ptr<StepDevice> make_gpu_step_device(Context& ctx, const ModelConfig& config,
                                                 RankLink link) {
  return std::make_unique<GpuStepDevice>(ctx, config, link);
}

}  // namespace turbomind
