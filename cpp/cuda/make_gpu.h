// The functions by which gpu.cc opens GPUs. Each kind has its own file.
#pragma once

#include <memory>
#include <string>

#include "cuda/gpu.h"

namespace turbomind {

namespace cuda {
int count_gpus(std::string* why);
GpuInfo read_info(int index);
std::unique_ptr<Gpu> make_gpu(int index);
}  // namespace cuda

namespace cuda_emulated {
int count_gpus();
GpuInfo read_info(int index);
std::unique_ptr<Gpu> make_gpu(int index);
}  // namespace cuda_emulated

}  // namespace turbomind
