// What launch() of cuda/kernel_nvcc.h needs beside the launch itself. `signature` is that of
// launch(), which names the kernel.
#pragma once

#include <vector_types.h>

#include <cstddef>

namespace turbomind::cuda {

// Lets the kernel have that much dynamic shared memory on the current device; asks the driver only
// when it is more than ever before.
void raise_shared_limit(const void* kernel, size_t bytes, const char* signature);

// Throws Error(internal) if the launch before was refused.
void check_launch(const char* signature, dim3 grid, int threads, size_t shared_bytes);

}  // namespace turbomind::cuda
