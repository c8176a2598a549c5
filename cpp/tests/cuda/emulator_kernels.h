// For drivers that define kernels for the emulator; TM_CUDA_NS is cuda_emulated in them.
#pragma once

#include <cstdio>
#include <string>

#include "core/error.h"
#include "cuda/kernel.h"

namespace turbomind::cuda_emulated {

// Checks that f() throws an error that contains `text`.
template <typename F>
bool throws(const std::string& text, F&& f) {
  try {
    f();
  } catch (const Error& e) {
    if (std::string(e.what()).find(text) != std::string::npos) return true;
    std::printf("expected '%s' in '%s'\n", text.c_str(), e.what());
    return false;
  }
  std::printf("expected an error with '%s'\n", text.c_str());
  return false;
}

struct Arrays {
  const float* x;
  float* y;
  int n;
  int mode;
};

// Fails: half a warp waits for the others, which return.
TM_KERNEL(64, 1) void fail(const Arrays) {
  wait_for_previous();
  if (threadIdx.x < 16) __syncthreads();
}

}  // namespace turbomind::cuda_emulated
