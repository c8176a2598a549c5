// Draws tokens from logits in device memory.
#pragma once

#include "core/tensor.h"
#include "cuda/gpu_context.h"
#include "ops/sample_cuda.h"

namespace turbomind {

class DeviceSampler {
 public:
  explicit DeviceSampler(GpuContext& gpu) : gpu_(gpu) {}
  void reserve(int64_t count);  // rows
  // Waits for the tokens; see Model::sample.
  void sample(const Mat& logits, int vocab, const DeviceSampleRow* rows, int64_t count,
              int32_t* tokens);

 private:
  GpuContext& gpu_;
  DeviceBuffer rows_, tokens_;
  PinnedBuffer host_rows_, host_tokens_;
};

}  // namespace turbomind
