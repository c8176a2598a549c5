#include "cuda/toolkit/launcher.h"

#include <cuda_runtime_api.h>

#include <mutex>

#include "core/error.h"
#include "cuda/kernel_name.h"
#include "cuda/launch_delay.h"
#include "cuda/probe_cuda.h"

namespace turbomind::cuda {

extern const ProbeCuda kProbeCuda;

namespace {

// Launches the kernel that delays the next one, where a test asks for it.
void delay_launch(StreamHandle stream) {
  static thread_local bool delaying = false;
  if (delaying) return;  // its own launch
  delaying = true;
  try {
    kProbeCuda.delay(stream, {launch_delay()});
  } catch (...) {
    delaying = false;
    throw;
  }
  delaying = false;
}

// A failed launch leaves its error in the runtime. It is cleared here, so that the next launch does
// not report it.
[[noreturn]] void refuse(const KernelLaunch& l, const char* what, cudaError_t error) {
  cudaGetLastError();
  throw_error(ErrorCode::internal, kernel_name(l.signature), ": ", what, " of (", l.grid.x, ", ",
              l.grid.y, ", ", l.grid.z, ") blocks of ", l.threads, " threads with ", l.shared_bytes,
              " bytes of shared memory: ", cudaGetErrorName(error), ": ",
              cudaGetErrorString(error));
}

// Setting a kernel up may load it, which may wait for the device. A device may wait for another one
// (cuda/device_wait.h), whose kernels then have to be set up meanwhile: each device has a lock.
//
// All kernels use the same split between first-level cache and shared memory: a multiprocessor must
// be empty to change it, so otherwise no kernel could start beside its predecessor.
void set_up(const KernelLaunch& l, int device, std::atomic<size_t>& ready) {
  static std::mutex mutexes[kMaxDevices];
  const std::lock_guard<std::mutex> lock(mutexes[device]);
  if (ready.load(std::memory_order_relaxed) > l.shared_bytes) return;
  cudaError_t error = cudaFuncSetAttribute(l.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared);
  constexpr size_t kWithoutAsking = 48 << 10;
  if (error == cudaSuccess && l.shared_bytes > kWithoutAsking)
    error = cudaFuncSetAttribute(l.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(l.shared_bytes));
  if (error != cudaSuccess) refuse(l, "setup", error);
  ready.store(l.shared_bytes + 1, std::memory_order_relaxed);
}

}  // namespace

LaunchTarget& launch_target() {
  static thread_local LaunchTarget target;
  return target;
}

void launch_kernel(const KernelLaunch& l, KernelSetup& setup) {
  LaunchTarget& target = launch_target();
  if (target.device < 0 || target.device >= kMaxDevices)
    throw_error(ErrorCode::internal, kernel_name(l.signature), ": launched on device ",
                target.device, ", expected 0 to ", kMaxDevices - 1,
                ", made current by Gpu::make_current");
  if (target.overlap && launch_delay() > 0) delay_launch(l.stream);
  std::atomic<size_t>& ready = setup.ready[target.device];
  if (ready.load(std::memory_order_relaxed) <= l.shared_bytes) set_up(l, target.device, ready);

  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = l.grid;
  config.blockDim = dim3(static_cast<unsigned>(l.threads));
  config.dynamicSmemBytes = l.shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(l.stream);
  config.attrs = &overlap;
  config.numAttrs = target.overlap ? 1 : 0;
  void* arguments[] = {const_cast<void*>(l.params)};
  const cudaError_t error = cudaLaunchKernelExC(&config, l.kernel, arguments);
  if (error != cudaSuccess) refuse(l, "launch", error);
}

}  // namespace turbomind::cuda
