// A kernel that tests if a device runs this build's kernels at all, and one that delays others.
#pragma once

#include "cuda/types.h"

namespace turbomind {

struct ProbeParams {
  int* out;  // receives `value`
  int value;
};

struct DelayParams {
  int microseconds;
};

struct ProbeCuda {
  void (*probe)(StreamHandle stream, const ProbeParams& params);
  // Returns true if a device of compute capability `major`.x runs code compiled for its own
  // generation, not for an older one.
  bool (*compiled_for)(int major);
  // Lets its successor start and ends so long after its predecessor (cuda/launch_delay.h).
  void (*delay)(StreamHandle stream, const DelayParams& params);
};

}  // namespace turbomind
