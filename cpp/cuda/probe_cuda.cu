#include "cuda/probe_cuda.h"

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

TM_KERNEL(32, 1) void probe_device(const ProbeParams p) {
  let_next_start();
  wait_for_previous();
  if (threadIdx.x == 0) store(p.out, p.value);
}

TM_KERNEL(32, 1) void delay_next(const DelayParams p) {
  let_next_start();
  wait_for_previous();
#ifndef TM_CUDA_EMULATED
  constexpr unsigned kPiece = 1000;  // nanoseconds; the hardware may sleep for up to twice as long
  for (int i = 0; i < p.microseconds; ++i) __nanosleep(kPiece);
#endif
}

static void probe(StreamHandle stream, const ProbeParams& params) {
  launch<probe_device>(stream, dim3(1), kWarp, 0, params);
}

static void delay(StreamHandle stream, const DelayParams& params) {
  launch<delay_next>(stream, dim3(1), kWarp, 0, params);
}

#ifdef TM_CUDA_EMULATED
static bool compiled_for(int) {
  return true;
}
#else
static bool compiled_for(int major) {
  constexpr int kArchs[] = {__CUDA_ARCH_LIST__};  // 900 is 9.0
  for (const int arch : kArchs)
    if (arch / 100 == major) return true;
  return false;
}
#endif

extern const ProbeCuda kProbeCuda;
const ProbeCuda kProbeCuda{probe, compiled_for, delay};

}  // namespace turbomind::TM_CUDA_NS
