// Token ids of a step that is submitted before those of the step before it are known to the host.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace turbomind {

// token_ids[i] becomes drawn[from[i]], or 0 where that is negative: no token was to be had, and
// nobody will use the row. A negative from[i] leaves it as it is. Pointers are device memory.
struct DeviceNextTokens {
  const int32_t* from = nullptr;  // [count]
  const int32_t* drawn = nullptr;
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
