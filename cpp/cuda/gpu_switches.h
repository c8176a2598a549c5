// Environment variables that switch parts of the GPU backend off, to find the part that a wrong
// result or a slow step comes from. They change no result.
#pragma once

namespace turbomind {

struct GpuSwitches {
  // TM_CUDA_OVERLAP: a kernel may start while its predecessor ends (cuda/kernel.h), and the host
  // submits a step while the device computes the one before it.
  bool overlap = true;
  // TM_CUDA_GRAPHS: decode steps are captured as graphs (model/device/step_graphs.h).
  bool graphs = true;
};

// Reads the environment: "0" switches off, "1" or nothing on. Throws Error(invalid_request) for
// other values.
GpuSwitches read_gpu_switches();

}  // namespace turbomind
