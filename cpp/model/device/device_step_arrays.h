// The arrays of a step in device memory, brought there by one copy.
#pragma once

#include <memory>

#include "model/config.h"
#include "model/launch_kind.h"
#include "model/model.h"
#include "model/step_inputs.h"

namespace turbomind {

// Steps with equal keys differ in the contents of the arrays alone, so that one captured graph
// serves them all. Only steps of one token per sequence, all sampled, have a key.
struct StepKey {
  int rows = 0;   // of the batch bucket; 0: no key
  int pages = 0;  // that the longest sequence may have, per cache group
  auto operator<=>(const StepKey&) const = default;
};

// Returns the kind of a step. `library`: cuBLASLt may have a kernel of its own for each number of
// tokens or samples, which are then not rounded.
LaunchKind launch_kind(const StepBatch& batch, bool library, bool profiled);

class DeviceStepArrays {
 public:
  virtual ~DeviceStepArrays() = default;
  // Submits the copy of a step's arrays. Where the step has a key its token rows are followed by
  // padding up to the bucket. `sampled`, in memory that the device reads: what
  // StepBatch::token_from points to; null where nothing was sampled yet. `first_count`: see
  // StepInputs.
  virtual const StepInputs& set(const StepBatch& batch, const int32_t* sampled,
                                uint32_t first_count) = 0;
  virtual StepKey key() const = 0;
  virtual void reserve(const StepLimits& most) = 0;
};

// `ctx`, `config` and `plan` stay alive.
std::unique_ptr<DeviceStepArrays> make_device_step_arrays(Context& ctx, const ModelConfig& config,
                                                          const CachePlan& plan);

// Returns the batch bucket that `rows` sequences are padded to, and the power of two that bounds
// their pages: few enough graphs, little padding.
int row_bucket(int rows);
int page_bucket(int pages);
// Returns the limits of steps with their padding.
StepLimits padded_limits(const StepLimits& most);

}  // namespace turbomind
