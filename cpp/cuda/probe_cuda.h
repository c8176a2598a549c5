// Whether a device runs this build's kernels at all.
#pragma once

#include "cuda/types.h"

namespace turbomind {

struct ProbeParams {
  int* out;  // gets `value`
  int value;
};

struct ProbeCuda {
  void (*probe)(StreamHandle stream, const ProbeParams& params);
  // Whether a device of compute capability `major`.x runs code that was compiled for its own
  // generation, not an older one's.
  bool (*compiled_for)(int major);
};

}  // namespace turbomind
