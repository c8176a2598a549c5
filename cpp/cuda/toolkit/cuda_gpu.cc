// A real GPU, through the CUDA runtime library, which loads the driver at the first call.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <exception>

#include "core/error.h"
#include "cuda/gpu_switches.h"
#include "cuda/make_gpu.h"
#include "cuda/probe_cuda.h"
#include "cuda/toolkit/launcher.h"

namespace turbomind::cuda {

extern const ProbeCuda kProbeCuda;

namespace {

// After these errors every later call fails with the same one until the process ends.
bool lasts(cudaError_t error) {
  switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
      return true;
    default:
      return false;
  }
}

// Any later call returns the error of a kernel.
void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears it, so that the next launch does not report it
  throw_error(ErrorCode::internal, call, ": ", cudaGetErrorName(error), ": ",
              cudaGetErrorString(error),
              lasts(error) ? "; this process cannot use the GPU any more" : "");
}
#define TM_CHECK_CUDA(call) check(call, #call)

cudaStream_t native(StreamHandle s) {
  return reinterpret_cast<cudaStream_t>(s);
}
cudaEvent_t native(EventHandle e) {
  return reinterpret_cast<cudaEvent_t>(e);
}
cudaGraphExec_t native(GraphHandle g) {
  return reinterpret_cast<cudaGraphExec_t>(g);
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

// Kernels that start early are part of captured graphs since CUDA 12.3; before that no step could
// be captured.
bool graphs_can_overlap() {
  constexpr int kSince = 12030;
  int driver = 0;
  TM_CHECK_CUDA(cudaDriverGetVersion(&driver));
  return driver >= kSince && CUDART_VERSION >= kSince;
}

// A driver's state does not survive a fork, and the errors it returns in the child are misleading.
std::atomic<pid_t> started_by{0};

bool is_forked() {
  const pid_t owner = started_by;
  return owner != 0 && owner != getpid();
}

class CudaGpu final : public Gpu {
 public:
  explicit CudaGpu(int device)
      : device_(device),
        info_(read_info(device)),
        can_overlap_(read_gpu_switches().overlap && info_.major >= 9 &&
                     kProbeCuda.compiled_for(info_.major) && graphs_can_overlap()),
        overlap_(can_overlap_) {
    make_current();
  }

  GpuKind kind() const override { return GpuKind::cuda; }
  int index() const override { return device_; }
  const GpuInfo& info() const override { return info_; }
  void make_current() override {
    // The runtime keeps a device per thread, which others in this process may have changed.
    LaunchTarget& target = launch_target();
    target.overlap = overlap_;
    int current = -1;
    const bool known = cudaGetDevice(&current) == cudaSuccess;
    if (known && current == device_ && target.device == device_) return;
    TM_CHECK_CUDA(cudaSetDevice(device_));
    // Other libraries of the process capture too, and may forbid allocating and waiting to all
    // threads but those in relaxed mode.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    TM_CHECK_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    target.device = device_;
  }
  bool set_overlap(bool on) override {
    overlap_ = on && can_overlap_;
    make_current();
    return overlap_;
  }

  size_t free_bytes() override {
    make_current();
    size_t free = 0, total = 0;
    TM_CHECK_CUDA(cudaMemGetInfo(&free, &total));
    return free;
  }

  bool enable_access(const Gpu& other) override {
    if (other.index() == device_) return true;
    make_current();
    int can = 0;
    TM_CHECK_CUDA(cudaDeviceCanAccessPeer(&can, device_, other.index()));
    if (can == 0) return false;
    const cudaError_t error = cudaDeviceEnablePeerAccess(other.index(), 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();  // by another engine of this process
      return true;
    }
    check(error, "cudaDeviceEnablePeerAccess");
    return true;
  }

  void* allocate(size_t bytes) override {
    if (bytes == 0) return nullptr;
    make_current();
    void* p = nullptr;
    const cudaError_t error = cudaMalloc(&p, bytes);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw_error(ErrorCode::internal, "out of device memory: asked for ", bytes, " bytes, ",
                  free_bytes(), " of ", info_.total_bytes, " are free");
    }
    check(error, "cudaMalloc");
    return p;
  }
  void free(void* p) noexcept override {
    if (enter()) cudaFree(p);
  }

  void* allocate_pinned(size_t bytes) override {
    if (bytes == 0) return nullptr;
    make_current();
    void* p = nullptr;
    const cudaError_t error = cudaHostAlloc(&p, bytes, cudaHostAllocPortable);
    if (error == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw_error(ErrorCode::internal, "out of pinned host memory: asked for ", bytes, " bytes");
    }
    check(error, "cudaHostAlloc");
    return p;
  }
  void free_pinned(void* p) noexcept override {
    if (enter()) cudaFreeHost(p);
  }

  void copy(StreamHandle stream, void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    make_current();
    TM_CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)));
  }
  void fill(StreamHandle stream, void* to, uint8_t value, size_t bytes) override {
    if (bytes == 0) return;
    make_current();
    TM_CHECK_CUDA(cudaMemsetAsync(to, value, bytes, native(stream)));
  }

  StreamHandle make_stream() override {
    make_current();
    cudaStream_t stream = nullptr;
    TM_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return reinterpret_cast<StreamHandle>(stream);
  }
  // After destroy() the caller may free the memory that the stream read and wrote.
  void destroy(StreamHandle stream) noexcept override {
    if (!enter()) return;
    cudaStreamSynchronize(native(stream));
    cudaStreamDestroy(native(stream));
  }
  void synchronize(StreamHandle stream) override {
    make_current();
    TM_CHECK_CUDA(cudaStreamSynchronize(native(stream)));
  }

  EventHandle make_event(bool timed) override {
    make_current();
    cudaEvent_t event = nullptr;
    const unsigned flags = timed ? cudaEventDefault : cudaEventDisableTiming;
    TM_CHECK_CUDA(cudaEventCreateWithFlags(&event, flags));
    return reinterpret_cast<EventHandle>(event);
  }
  void destroy(EventHandle event) noexcept override {
    if (enter()) cudaEventDestroy(native(event));
  }
  void record(EventHandle event, StreamHandle stream) override {
    make_current();
    TM_CHECK_CUDA(cudaEventRecord(native(event), native(stream)));
  }
  void wait(StreamHandle stream, EventHandle event) override {
    make_current();
    TM_CHECK_CUDA(cudaStreamWaitEvent(native(stream), native(event), 0));
  }
  bool query(EventHandle event) override {
    make_current();
    const cudaError_t error = cudaEventQuery(native(event));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(error, "cudaEventQuery");
    return true;
  }
  void synchronize(EventHandle event) override {
    make_current();
    TM_CHECK_CUDA(cudaEventSynchronize(native(event)));
  }
  float elapsed_ms(EventHandle begin, EventHandle end) override {
    make_current();
    float ms = 0;
    TM_CHECK_CUDA(cudaEventElapsedTime(&ms, native(begin), native(end)));
    return ms;
  }

  GraphHandle capture(StreamHandle stream, const std::function<void()>& submit) override {
    make_current();
    // Other threads may allocate and copy meanwhile.
    TM_CHECK_CUDA(cudaStreamBeginCapture(native(stream), cudaStreamCaptureModeThreadLocal));
    std::exception_ptr failure;
    try {
      submit();
    } catch (...) {
      failure = std::current_exception();
    }
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(native(stream), &graph);
    if (failure) {
      if (graph) cudaGraphDestroy(graph);
      cudaGetLastError();
      std::rethrow_exception(failure);
    }
    check(ended, "cudaStreamEndCapture");
    cudaGraphExec_t exec = nullptr;
    const cudaError_t instantiated = cudaGraphInstantiateWithFlags(&exec, graph, 0);
    cudaGraphDestroy(graph);
    check(instantiated, "cudaGraphInstantiateWithFlags");
    const GraphHandle handle = reinterpret_cast<GraphHandle>(exec);
    try {
      TM_CHECK_CUDA(cudaGraphUpload(exec, native(stream)));
    } catch (...) {
      destroy(handle);
      throw;
    }
    return handle;
  }
  void launch(GraphHandle graph, StreamHandle stream) override {
    make_current();
    TM_CHECK_CUDA(cudaGraphLaunch(native(graph), native(stream)));
  }
  void destroy(GraphHandle graph) noexcept override {
    if (enter()) cudaGraphExecDestroy(native(graph));
  }

 private:
  // Prepares a release, which any thread may do: a thread without a current device would create a
  // context on the first one. Returns false if the runtime is gone, as at the end of the process.
  bool enter() noexcept {
    try {
      make_current();
      return true;
    } catch (...) {
      return false;
    }
  }

  const int device_;
  const GpuInfo info_;
  const bool
      can_overlap_;  // code compiled for an older generation does not wait for its predecessor
  std::atomic<bool> overlap_;
};

}  // namespace

int count_gpus(std::string* why) {
  if (is_forked()) {
    if (why)
      *why =
          "no CUDA device: this process was forked from one that had started CUDA; start it as a "
          "new one (multiprocessing: \"spawn\")";
    return 0;
  }
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    count = 0;
    int driver = 0;  // stays 0 without a driver; the runtime's error then calls it old
    const bool none = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
    if (why)
      *why = std::string("no CUDA device: ") +
             (none ? "no driver is installed" : cudaGetErrorString(error));
  } else if (count == 0 && why) {
    *why = "no CUDA device: the driver reports none";
  }
  if (count > 0) started_by = getpid();
  return count;
}

GpuInfo read_info(int index) {
  cudaDeviceProp properties{};
  TM_CHECK_CUDA(cudaGetDeviceProperties(&properties, index));
  GpuInfo info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.shared_bytes =
      static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index));
  info.l2_bytes = static_cast<size_t>(properties.l2CacheSize);
  info.total_bytes = properties.totalGlobalMem;
  return info;
}

std::unique_ptr<Gpu> make_gpu(int index) {
  return std::make_unique<CudaGpu>(index);
}

}  // namespace turbomind::cuda
