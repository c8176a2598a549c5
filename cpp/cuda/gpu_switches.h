// Environment variables that switch parts of the GPU backend off or on, to find the part that a
// wrong result or a slow step comes from. They change no result.
#pragma once

namespace turbomind {

struct GpuSwitches {
  // TM_CUDA_OVERLAP: a kernel may start while its predecessor ends (cuda/kernel.h), and the host
  // submits a step while the device computes the one before it.
  bool overlap = true;
  // TM_CUDA_GRAPHS: decode steps are captured as graphs (model/device/step_graphs.h).
  bool graphs = true;
  // TM_CUDA_RANK_WAITS, for checks: ranks on one GPU have a stream each, and their kernels wait for
  // each other as those of several GPUs do (model/parallel/gpu_exchange.h). `overlap` is then off:
  // a kernel that takes places before its turn could keep the other rank's kernels from them.
  bool rank_waits = false;
};

// Reads the environment: "0" switches off, "1" on, and nothing is the value above. Throws
// Error(invalid_request) for other values.
GpuSwitches read_gpu_switches();

}  // namespace turbomind
