// The one interface between a decoder's forward pass and a kind of device.
// The forward pass itself (model/decoder/decoder.cc) has no branch on the device; the ops choose
// their kernels by the context (ops/dispatch.h).
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "cache/page_io.h"
#include "core/context.h"
#include "core/tensor.h"
#include "model/config.h"
#include "model/model.h"
#include "model/parallel/rank_sums.h"
#include "model/step_inputs.h"

namespace turbomind {

// Raised by every change after which a kernel gives other bits for the same input: pages that an
// older build stored are then not taken for bit-equal.
constexpr int kKernelRevision = 2;

// The memory of a decoder's pages.
class DecoderPages : public PageIo {
 public:
  virtual PageView view(int group) const = 0;
};

class StepDevice {
 public:
  // Computes the layers of a step into logits [in.samples, vocab]; false when `cancel` was
  // requested between two layers.
  using Forward =
      std::function<bool(const StepInputs& in, const Mat& logits, const StepCancel* cancel)>;

  virtual ~StepDevice() = default;
  virtual const CachePlan& cache() const = 0;  // with the layouts that the device's kernels read
  virtual std::string numerics_fingerprint() const = 0;
  virtual DecoderPages& pages() = 0;
  virtual StepOutputs* outputs() { return nullptr; }  // see Model::outputs

  // See Model::reserve. Calls `workspaces` with the limits of padded steps where the device
  // allocates ahead.
  virtual void reserve(const StepLimits&, const std::function<void(const StepLimits&)>&) {}
  virtual int64_t free_bytes() const { return 0; }
  virtual WarmUp warm_up(Model&, const StepLimits&, double) { return {}; }
  // See Model::forward; the batch has tokens.
  virtual bool run(const StepBatch& batch, float* logits, const StepCancel* cancel,
                   const Forward& forward) = 0;
  // See Model::release. Returns whether the decoder is to free its weights and workspaces too.
  virtual bool release() noexcept { return false; }
};

// Returns the device of a context, for a rank of several where `link` says so. `ctx`, `config` and
// what the link points to stay alive.
std::unique_ptr<StepDevice> make_step_device(Context& ctx, const ModelConfig& config,
                                             RankLink link);
std::unique_ptr<StepDevice> make_gpu_step_device(Context& ctx, const ModelConfig& config,
                                                 RankLink link);

}  // namespace turbomind
