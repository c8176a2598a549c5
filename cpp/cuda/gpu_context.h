// One model's share of a GPU: the stream it submits to, cuBLASLt, and memory that ops keep from
// step to step. Nothing here depends on an op; see GpuState.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/memory.h"
#include "cuda/cublaslt.h"
#include "cuda/gpu.h"
#include "cuda/gpu_switches.h"

namespace turbomind {

struct GpuOptions {
  GpuKind kind = GpuKind::cuda;
  int index = 0;
  bool deterministic = false;  // only kernels that give a row the same bits in any batch
  std::vector<std::string> library_folders;  // where cuBLASLt may be; see CublasLt::open
};

class GpuContext;

// State of an op between steps, such as work memory, that a context owns. A derived class is
// made from a GpuContext& at its first GpuContext::state<T>(), and lives as long as the context.
class GpuState {
 public:
  virtual ~GpuState() = default;
  // Frees its device memory: no step follows.
  virtual void release() noexcept = 0;
};

// Used by the thread that runs the model's steps.
class GpuContext {
 public:
  // With `same`, of the same GPU, the two share the GPU and, unless GpuSwitches::rank_waits is on,
  // the stream. They may be used by a thread each.
  explicit GpuContext(const GpuOptions& options, const GpuContext* same = nullptr);

  Gpu& gpu() const { return *gpu_; }
  GpuKind kind() const { return gpu_->kind(); }
  const GpuStream& stream() const { return *stream_; }
  StreamHandle handle() const { return stream_->handle(); }
  bool deterministic() const { return deterministic_; }
  const GpuSwitches& switches() const { return switches_; }  // as they were when this was made
  CublasLt* library() const { return library_.get(); }       // null: not used
  GpuLimits limits() const;
  // Returns which cuBLASLt is used, or why none is, what is switched off, and the notes added
  // since. Any thread may call it.
  std::string library_note() const;
  void add_note(const std::string& text);
  size_t library_version() const { return library_ ? library_->version() : 0; }  // 0: not used

  // Returns the context's only object of type T, derived from GpuState.
  template <typename T>
  T& state() {
    std::unique_ptr<GpuState>& slot = state_slot(state_index<T>());
    if (!slot) slot = std::make_unique<T>(*this);
    return static_cast<T&>(*slot);
  }
  // Has at least `bytes` bytes in `buffer`; old contents are lost. Waits for the stream where the
  // memory moves.
  void grow(DeviceBuffer& buffer, size_t bytes);
  // Frees the device memory of every state(): no step follows.
  void release() noexcept;

  // Pinned memory, which copies beside steps need. It may outlive this.
  HostMemory host_memory() const;

  // Rises when memory that kernels were given moves: graphs captured before then hold stale
  // addresses.
  uint64_t epoch() const { return epoch_; }
  void moved() { ++epoch_; }

 private:
  static int next_state_index();
  template <typename T>
  static int state_index() {
    static const int index = next_state_index();
    return index;
  }
  std::unique_ptr<GpuState>& state_slot(int index);

  const GpuSwitches switches_;
  std::shared_ptr<Gpu> gpu_;
  std::shared_ptr<GpuStream> stream_;
  const bool deterministic_;
  DeviceBuffer library_workspace_;
  std::unique_ptr<CublasLt> library_;
  mutable std::mutex note_mutex_;
  std::string library_note_;
  std::vector<std::unique_ptr<GpuState>> states_;
  uint64_t epoch_ = 0;
};

}  // namespace turbomind
