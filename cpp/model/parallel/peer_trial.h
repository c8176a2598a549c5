// Whether GPUs can use each other's memory, which drivers report for machines where it gives wrong
// values or never returns.
#pragma once

#include <vector>

#include "cuda/gpu_context.h"

namespace turbomind {

// Gives all GPUs access to each other's memory and tries it: each writes a pattern, and a kernel of
// each other one waits for it, at most 0.1 s, and reads it, as the exchanges of a step do. Returns
// whether all are right; else the first context gets a note that names a pair that is not. GPUs in
// the list may be equal.
bool connect_peers(const std::vector<GpuContext*>& gpus);

}  // namespace turbomind
