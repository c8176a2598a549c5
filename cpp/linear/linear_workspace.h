// The settings and scratch memory that all products of a model on a GPU share.
#pragma once

#include "cuda/gpu_context.h"
#include "linear/linear_cuda.h"

namespace turbomind {

// Returns the settings for products of a context. With `gated_rows` > 0 and cuBLASLt there is
// scratch for the gates and ups of that many rows of a weight with `gated_n` rows, or for as many
// rows as 256 MiB hold. The reference stays valid until the context ends.
const DeviceLinear& device_linear(GpuContext& gpu, int64_t gated_rows, int64_t gated_n);

}  // namespace turbomind
