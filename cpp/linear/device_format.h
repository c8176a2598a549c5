// Weights as the GPU's kernels read them: row-major, 16-bit, rows padded with zeros to whole blocks
// of K. Also what cuBLASLt takes.
#pragma once

#include <string>

#include "linear/weight_format.h"

namespace turbomind {

// The formats that have kernels on a GPU: "bfloat16" and "float16". Throws Error(model) for any
// other name. matmul needs a context with a GPU, and a weight whose data is device memory;
// unpack_row and pack work on host memory.
const WeightFormat& device_format(const std::string& name);

}  // namespace turbomind
