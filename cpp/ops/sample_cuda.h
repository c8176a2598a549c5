// From rows of logits to tokens without leaving the GPU: greedy, temperature, top-k, top-p, min-p.
// Rows with penalties, biases and banned words are edited and drawn from on the host
// (sampler.h).
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace turbomind {

// One token to draw. The effective meaning is that of SamplingParams; `uniform` is the token's
// Philox number in [0, 1) as 53 bits (core/philox.h), which the host knows ahead of the logits.
struct DeviceSampleRow {
  int32_t logits_row = 0;  // -1: padding, nothing is read or written
  int32_t out = 0;         // index into DeviceSampling::tokens
  int32_t top_k = 0;       // 0: all; 1: greedy
  float temperature = 1;   // 0: greedy
  float top_p = 1;
  float min_p = 0;
  uint64_t uniform = 0;
};

struct DeviceSampling {
  const float* logits = nullptr;  // [rows][stride] float32
  int64_t stride = 0;             // elements, a multiple of 4; logits are 16-byte aligned
  int32_t vocab = 0;              // at most kMaxSampledVocab
  int32_t num_rows = 0;
  const DeviceSampleRow* rows = nullptr;  // device memory
  // Device memory, out: the token, or -1 for a row with a NaN or +inf or without any finite logit.
  int32_t* tokens = nullptr;
};

constexpr int32_t kMaxSampledVocab = 1 << 20;

struct SampleCuda {
  void (*sample)(StreamHandle stream, const DeviceSampling& sampling);
};

namespace cuda_emulated {
extern const SampleCuda kSampleCuda;
}
namespace cuda {
extern const SampleCuda kSampleCuda;  // where nvcc was there
}

}  // namespace turbomind
