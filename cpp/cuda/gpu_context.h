// What the ops need of a GPU beside the kernels: where to submit, with which scratch memory.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/memory.h"
#include "cuda/cublaslt.h"
#include "cuda/gpu.h"
#include "linear/linear_cuda.h"
#include "ops/attention_cuda.h"

namespace turbomind {

struct GpuOptions {
  GpuKind kind = GpuKind::cuda;
  int index = 0;
  bool deterministic = false;  // only kernels that give a row the same bits in any company
  std::vector<std::string> library_folders;  // where cuBLASLt may be; see CublasLt::open
};

// One model's share of a GPU; used by the thread that runs its steps.
class GpuContext {
 public:
  explicit GpuContext(const GpuOptions& options);

  Gpu& gpu() const { return *gpu_; }
  GpuKind kind() const { return gpu_->kind(); }
  const GpuStream& stream() const { return stream_; }
  StreamHandle handle() const { return stream_.handle(); }
  bool deterministic() const { return linear_.deterministic; }
  GpuLimits limits() const;
  // Which cuBLASLt is used, or why none, and what was noted since. Any thread may ask.
  std::string library_note() const;
  void add_note(const std::string& text);
  size_t library_version() const { return library_ ? library_->version() : 0; }  // 0: not used

  // `gated_rows` rows of gates and ups of a weight with gated_n rows get scratch; 0: none needed.
  const DeviceLinear& linear(int64_t gated_rows, int64_t gated_n);
  float* attention_workspace(size_t bytes);
  void give_back() noexcept;  // what the two above have; nothing uses it any more

  // Pinned memory, which copies beside steps need. It may outlive this.
  HostMemory host_memory() const;

  // Rises when memory that kernels were given moves: graphs captured before then hold stale
  // addresses.
  uint64_t epoch() const { return epoch_; }
  void moved() { ++epoch_; }

 private:
  void grow(DeviceBuffer& buffer, size_t bytes);

  std::shared_ptr<Gpu> gpu_;
  GpuStream stream_;
  DeviceBuffer library_workspace_, gate_scratch_, attention_workspace_;
  std::unique_ptr<CublasLt> library_;
  mutable std::mutex note_mutex_;
  std::string library_note_;
  DeviceLinear linear_;
  uint64_t epoch_ = 0;
};

}  // namespace turbomind
