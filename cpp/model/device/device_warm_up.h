// Warm-up of a GPU when a model is loaded: kernels that are loaded at their first launch,
// cuBLASLt's choice of algorithms, captured graphs. Otherwise the first requests would wait for
// these.
#pragma once

#include "cuda/gpu_context.h"
#include "model/model.h"

namespace turbomind {

// Runs steps of the kinds that `most` allows on the model's first page, whose contents are lost:
// decode steps twice, so that they are captured (model/device/step_graphs.h), prompts of several
// lengths once, and samples tokens both ways. It begins with the kinds that most requests have, and
// ends early after `seconds`, or when the device has hardly any memory left. Throws what a step
// throws.
WarmUp warm_up_device(Model& model, GpuContext& gpu, const StepLimits& most, double seconds);

}  // namespace turbomind
