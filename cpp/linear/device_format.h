// Weights as the GPU's kernels read them: row-major, 16-bit, rows padded with zeros to whole blocks
// of K. Also what cuBLASLt takes.
#pragma once

#include "linear/weight_format.h"

namespace turbomind {

// matmul needs a context with a GPU, and a weight whose data is device memory; unpack_row and pack
// work on host memory.
const WeightFormat& device_bfloat16_format();
const WeightFormat& device_float16_format();

}  // namespace turbomind
