#include "cuda/gpu.h"

#include "core/error.h"
#include "cuda/dispatch.h"
#include "cuda/make_gpu.h"
#include "cuda/probe_cuda.h"

namespace turbomind {

TM_GPU_TABLE(ProbeCuda, kProbeCuda, probe_cuda)

namespace {

// Runs a kernel, so that a device that this build's code does not fit fails here, not in a request.
void probe(Gpu& gpu) {
  constexpr int kValue = 20260906;
  const DeviceBuffer out(gpu, sizeof(int));
  const PinnedBuffer copy(gpu, sizeof(int));
  const GpuStream stream(gpu);
  gpu.make_current();
  probe_cuda(gpu.kind()).probe(stream.handle(), {out.as<int>(), kValue});
  gpu.copy(stream.handle(), copy.data(), out.data(), sizeof(int));
  stream.synchronize();
  if (*copy.as<int>() == kValue) return;
  throw_error(ErrorCode::internal, gpu.info().name, ": a kernel should have written ", kValue,
              " but there is ", *copy.as<int>());
}

void check_index(GpuKind kind, int index) {
  std::string why;
  const int count = gpu_count(kind, &why);
  if (count == 0) throw_error(ErrorCode::invalid_request, why);
  if (index < 0 || index >= count)
    throw_error(ErrorCode::invalid_request, "device index: got ", index, ", expected 0 to ",
                count - 1);
}

}  // namespace

int gpu_count(GpuKind kind, std::string* why) {
  if (kind == GpuKind::emulated) return cuda_emulated::count_gpus();
#ifdef TM_HAVE_CUDA
  return cuda::count_gpus(why);
#else
  if (why) *why = "no CUDA device: built without CUDA";
  return 0;
#endif
}

GpuInfo gpu_info(GpuKind kind, int index) {
  check_index(kind, index);
#ifdef TM_HAVE_CUDA
  if (kind == GpuKind::cuda) return cuda::read_info(index);
#endif
  return cuda_emulated::read_info(index);
}

std::unique_ptr<Gpu> open_gpu(GpuKind kind, int index) {
  check_index(kind, index);
  std::unique_ptr<Gpu> gpu;
  if (kind == GpuKind::emulated) gpu = cuda_emulated::make_gpu(index);
#ifdef TM_HAVE_CUDA
  if (kind == GpuKind::cuda) gpu = cuda::make_gpu(index);
#endif
  probe(*gpu);
  return gpu;
}

}  // namespace turbomind
