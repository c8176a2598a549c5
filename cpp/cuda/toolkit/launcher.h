// The untyped part of launch() of cuda/kernel_nvcc.h.
#pragma once

#include <vector_types.h>

#include <atomic>
#include <cstddef>

#include "cuda/types.h"

namespace turbomind::cuda {

// Device and mode of the launches of this thread; set by Gpu::make_current.
struct LaunchTarget {
  int device = -1;
  // A kernel may start while the one before it in the stream ends (cuda/kernel.h).
  bool overlap = false;
};
LaunchTarget& launch_target();

// State of one kernel: for each device the dynamic shared memory set as its limit, plus one; 0: not
// set up yet.
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
  const char* signature;  // of launch(); contains the kernel's name
};

// Throws Error(internal) with the kernel's name if the launch is refused.
void launch_kernel(const KernelLaunch& launch, KernelSetup& setup);

}  // namespace turbomind::cuda
