// The kernels of ops/logprobs.h on a GPU.
#pragma once

#include <cstdint>

#include "cuda/types.h"
#include "ops/logprobs.h"

namespace turbomind {

// Pointers are device memory.
struct DeviceLogprobs {
  const float* logits = nullptr;  // [rows][stride] float32
  int64_t stride = 0;             // elements, a multiple of 4; logits are 16-byte aligned
  int32_t vocab = 0;              // at most kMaxSampledVocab (ops/sample_cuda.h)
  int32_t num_rows = 0;
  const LogprobRow* rows = nullptr;
  const int32_t* tokens = nullptr;
  // Out, per row: the token's own, then the likeliest first, of equals the lower id. Nothing where
  // the token is negative: the row is not finite.
  Logprob* out = nullptr;
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
