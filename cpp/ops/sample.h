// Sampling of tokens from rows of logits: greedy, temperature, top-k, top-p, min-p.
//
// CPU and GPU take the same rows and follow the same rule. The GPU's kernels are
// ops/sample_cuda.h; on the CPU sampling/sampler.h samples, which also applies penalties, biases
// and banned words: rows that need those are sampled there on any device.
#pragma once

#include <cstdint>

namespace turbomind {

// One token to sample from float32 logits [vocab]. Fields mean what they mean in SamplingParams.
// `uniform` is the token's Philox number in [0, 1) as 53 bits (core/philox.h), which does not
// depend on the logits.
struct SampleRow {
  int32_t logits_row = 0;  // of the step's sampled rows; -1: padding, nothing is read or written
  int32_t out = 0;         // index of the token in the output
  int32_t top_k = 0;       // 0: all; 1: greedy
  float temperature = 1;   // 0: greedy
  float top_p = 1;
  float min_p = 0;
  uint64_t uniform = 0;
};

}  // namespace turbomind
