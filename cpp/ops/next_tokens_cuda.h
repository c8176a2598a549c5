// The kernel of ops/next_tokens.h on a GPU.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace turbomind {

// Pointers are device memory.
struct DeviceNextTokens {
  const int32_t* from = nullptr;  // [count]
  const int32_t* sampled = nullptr;
  int32_t* token_ids = nullptr;  // [count]
  int32_t count = 0;
};

struct NextTokensCuda {
  void (*fill)(StreamHandle stream, const DeviceNextTokens& tokens);
};

namespace cuda_emulated {
extern const NextTokensCuda kNextTokensCuda;
}
namespace cuda {  // where nvcc was there
extern const NextTokensCuda kNextTokensCuda;
}

}  // namespace turbomind
