// The kernels of ops/routing.h on a GPU.
#pragma once

#include <cstdint>

#include "cuda/types.h"
#include "ops/routing.h"

namespace turbomind {

// Pointers are device memory.
struct DeviceRoute {
  RouteShape shape;
  Routing routing;
  const float* logits = nullptr;  // [tokens][stride]
  int64_t stride = 0;             // elements
};

struct DeviceCombine {
  Routing routing;
  const float* outputs = nullptr;  // [rows][x_stride]
  const float* beside = nullptr;   // [tokens][beside_stride], or null
  const float* gate = nullptr;     // [tokens][gate_stride], or null
  float* y = nullptr;              // [tokens][y_stride]
  int64_t x_stride = 0;            // elements
  int64_t beside_stride = 0;
  int64_t gate_stride = 0;
  int64_t y_stride = 0;
  int32_t cols = 0;
  bool add = false;
};

struct RoutingCuda {
  void (*choose)(StreamHandle stream, const DeviceRoute& route);  // expert and weight
  void (*order)(StreamHandle stream, const DeviceRoute& route);   // row, token and begin
  void (*combine)(StreamHandle stream, const DeviceCombine& combine);
};

namespace cuda_emulated {
extern const RoutingCuda kRoutingCuda;
}
namespace cuda {  // where nvcc was there
extern const RoutingCuda kRoutingCuda;
}

}  // namespace turbomind
