// The limits of the CUDA build, in one place. A model or an option that needs it is refused when it
// is loaded, never in a step:
//   - weights of another type than bfloat16 and float16 (linear/device_format.h);
//   - KV of another type than the weights;
//   - heads whose K or V is wider than 256 values, or not a multiple of 8 wide;
//   - layers of more than 24,576 values (a row of them lies in shared memory);
//   - vocabularies of more than 2^20 tokens;
//   - heads whose tiles do not fit the shared memory that the device gives a block;
//   - steps of more than 65,535 tokens (prefill_chunk and max_batch_size), a grid's second
//   dimension.
// Everything else in the headers of cpp/ops works there too. Penalties, biases and banned
// words of a row are the host's work (sampling/sampler.h).
#pragma once

#include "cuda/gpu_context.h"
#include "model/config.h"
#include "model/model.h"

namespace turbomind {

// Throws Error(model) naming what the device lacks.
void check_device_limits(const ModelConfig& config, const GpuInfo& gpu);

// Throws Error(invalid_request) for steps that no grid is large enough for.
void check_device_steps(const StepLimits& most);

// Returns the work memory of attention for any step within these limits, in bytes.
size_t attention_workspace_bytes(const ModelConfig& config, const GpuContext& gpu,
                                 const StepLimits& most);

}  // namespace turbomind
