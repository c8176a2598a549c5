// Memory of whatever a context computes on.
#pragma once

#include "core/context.h"
#include "core/memory.h"
#include "cuda/gpu_context.h"

namespace turbomind {

// Huge pages, zero, on the CPU; undefined device memory on a GPU.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Context& ctx, size_t bytes) {
    if (ctx.gpu)
      device_ = DeviceBuffer(ctx.gpu->gpu(), bytes);
    else
      host_ = HugeBuffer(bytes);
  }
  uint8_t* data() const { return device_ ? device_.data() : host_.data(); }
  size_t size() const { return device_ ? device_.size() : host_.size(); }

 private:
  HugeBuffer host_;
  DeviceBuffer device_;
};

}  // namespace turbomind
