// Log-probabilities of tokens that were just drawn, and of the likeliest ones, without leaving the
// GPU: of the model's own logits, whatever the temperature.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace turbomind {

constexpr int kMostTopTokens = 256;

struct DeviceLogprob {
  int32_t token = -1;
  float logprob = 0;
};

// What is wanted of one row, whose token is drawn by then.
struct DeviceLogprobRow {
  int32_t logits_row = 0;
  int32_t drawn = 0;  // index into DeviceLogprobs::tokens
  int32_t top = 0;    // so many of the likeliest tokens; at most kMostTopTokens and the vocabulary
  int32_t out = 0;    // index into DeviceLogprobs::out, of 1 + top entries
};

// Pointers are device memory.
struct DeviceLogprobs {
  const float* logits = nullptr;  // [rows][stride] float32
  int64_t stride = 0;             // elements, a multiple of 4; logits are 16-byte aligned
  int32_t vocab = 0;              // at most kMaxSampledVocab (ops/sample_cuda.h)
  int32_t num_rows = 0;
  const DeviceLogprobRow* rows = nullptr;
  const int32_t* tokens = nullptr;
  // Out, per row: the token's own, then the likeliest first, of equals the lower id. Nothing where
  // the token is negative: the row is not finite.
  DeviceLogprob* out = nullptr;
};

struct LogprobsCuda {
  void (*logprobs)(StreamHandle stream, const DeviceLogprobs& logprobs);
};

namespace cuda_emulated {
extern const LogprobsCuda kLogprobsCuda;
}
namespace cuda {  // where nvcc was there
extern const LogprobsCuda kLogprobsCuda;
}

}  // namespace turbomind
