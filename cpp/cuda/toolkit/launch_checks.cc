#include "cuda/toolkit/launch_checks.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "cuda/kernel_name.h"

namespace turbomind::cuda {

void raise_shared_limit(const void* kernel, size_t bytes, const char* signature) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> limits;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  size_t& limit = limits[{kernel, device}];
  if (bytes <= limit) return;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) {
    cudaGetLastError();  // it is told here: the next launch must not see it
    throw_error(ErrorCode::internal, kernel_name(signature), ": ", bytes,
                " bytes of shared memory: ", cudaGetErrorName(error), ": ",
                cudaGetErrorString(error));
  }
  limit = bytes;
}

void check_launch(const char* signature, dim3 grid, int threads, size_t shared_bytes) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  throw_error(ErrorCode::internal, kernel_name(signature), ": launch of (", grid.x, ", ", grid.y,
              ", ", grid.z, ") blocks of ", threads, " threads with ", shared_bytes,
              " bytes of shared memory: ", cudaGetErrorName(error), ": ",
              cudaGetErrorString(error));
}

}  // namespace turbomind::cuda
