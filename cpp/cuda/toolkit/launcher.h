// The launch of cuda/kernel_nvcc.h, without the kernel's type.
#pragma once

#include <vector_types.h>

#include <atomic>
#include <cstddef>

#include "cuda/types.h"

namespace turbomind::cuda {

// What launches of this thread need to know; set by Gpu::make_current.
struct LaunchTarget {
  int device = -1;
  // Kernels may start while the one before them in the stream ends (cuda/kernel.h).
  bool overlap = false;
};
LaunchTarget& launch_target();

// Of one kernel: the dynamic shared memory, plus one, that each device was told it may have; 0: the
// device does not know the kernel yet.
constexpr int kMaxDevices = 64;
struct KernelSetup {
  std::atomic<size_t> ready[kMaxDevices] = {};
};

struct KernelLaunch {
  const void* kernel;
  const void* params;
  StreamHandle stream;
  dim3 grid;
  int threads;
  size_t shared_bytes;
  const char* signature;  // of launch(), which names the kernel
};

// Throws Error(internal) naming the kernel if the launch is refused.
void launch_kernel(const KernelLaunch& launch, KernelSetup& setup);

}  // namespace turbomind::cuda
