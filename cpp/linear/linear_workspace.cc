#include "linear/linear_workspace.h"

#include <algorithm>

namespace turbomind {

namespace {

constexpr size_t kMostGateScratch = 256 << 20;  // more rows go in pieces

class LinearState final : public GpuState {
 public:
  explicit LinearState(GpuContext& gpu) : gpu_(gpu) {
    linear_.kind = gpu.kind();
    linear_.multiprocessors = gpu.gpu().info().multiprocessors;
    linear_.shared_per_block = gpu.gpu().info().shared_bytes;
    linear_.deterministic = gpu.deterministic();
    linear_.cublaslt = gpu.library();
  }

  const DeviceLinear& get(int64_t gated_rows, int64_t gated_n) {
    if (linear_.cublaslt && gated_rows > 0) {
      gpu_.grow(scratch_, std::min(gate_scratch_bytes(gated_rows, gated_n), kMostGateScratch));
      linear_.scratch = scratch_.data();
      linear_.scratch_bytes = scratch_.size();
    }
    return linear_;
  }

  void release() noexcept override {
    scratch_ = DeviceBuffer();
    linear_.scratch = nullptr;
    linear_.scratch_bytes = 0;
  }

 private:
  GpuContext& gpu_;
  DeviceBuffer scratch_;
  DeviceLinear linear_;
};

}  // namespace

const DeviceLinear& device_linear(GpuContext& gpu, int64_t gated_rows, int64_t gated_n) {
  return gpu.state<LinearState>().get(gated_rows, gated_n);
}

}  // namespace turbomind
