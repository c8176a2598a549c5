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
};

}  // namespace turbomind
