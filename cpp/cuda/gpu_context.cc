#include "cuda/gpu_context.h"

#include <algorithm>

namespace turbomind {

namespace {

constexpr size_t kLibraryWorkspace = 32 << 20;  // what cuBLASLt's heuristics want on Hopper
constexpr size_t kMostGateScratch = 256 << 20;  // more rows go in pieces
constexpr size_t kPinnedSlab = 64 << 20;        // pinning is slow: a little at a time
constexpr size_t kPinnedAhead = 512 << 20;      // and in the way of steps: not while pages wait

struct PinnedBlock {
  PinnedBlock(std::shared_ptr<Gpu> g, size_t bytes) : gpu(std::move(g)), buffer(*gpu, bytes) {}
  const std::shared_ptr<Gpu> gpu;
  const PinnedBuffer buffer;
};

}  // namespace

GpuContext::GpuContext(const GpuOptions& options)
    : gpu_(open_gpu(options.kind, options.index)), stream_(*gpu_) {
  linear_.kind = options.kind;
  linear_.multiprocessors = gpu_->info().multiprocessors;
  linear_.shared_per_block = gpu_->info().shared_bytes;
  linear_.deterministic = options.deterministic;
  if (options.deterministic || options.kind == GpuKind::emulated) {
    library_note_ = "our own kernels";
    return;
  }
  library_workspace_ = DeviceBuffer(*gpu_, kLibraryWorkspace);
  std::string why;
  library_ = CublasLt::open(
      options.library_folders, library_workspace_.data(), kLibraryWorkspace,
      [this](const std::string& text) { add_note(text); }, &why);
  library_note_ = library_ ? library_->path() : why;
  linear_.cublaslt = library_.get();
}

std::string GpuContext::library_note() const {
  const std::lock_guard lock(note_mutex_);
  return library_note_;
}

void GpuContext::add_note(const std::string& text) {
  const std::lock_guard lock(note_mutex_);
  library_note_ += "; " + text;
}

GpuLimits GpuContext::limits() const {
  return {gpu_->info().multiprocessors, gpu_->info().shared_bytes};
}

HostMemory GpuContext::host_memory() const {
  const auto allocate = [gpu = gpu_](size_t bytes) {
    const auto block = std::make_shared<PinnedBlock>(gpu, bytes);
    return HostBlock(block, block->buffer.data());
  };
  return {allocate, kPinnedSlab, kPinnedAhead};
}

void GpuContext::grow(DeviceBuffer& buffer, size_t bytes) {
  if (bytes <= buffer.size()) return;
  stream_.synchronize();
  buffer = DeviceBuffer();  // the old one goes first
  buffer = DeviceBuffer(*gpu_, bytes);
  moved();
}

const DeviceLinear& GpuContext::linear(int64_t gated_rows, int64_t gated_n) {
  if (linear_.cublaslt && gated_rows > 0) {
    grow(gate_scratch_, std::min(gate_scratch_bytes(gated_rows, gated_n), kMostGateScratch));
    linear_.scratch = gate_scratch_.data();
    linear_.scratch_bytes = gate_scratch_.size();
  }
  return linear_;
}

void GpuContext::give_back() noexcept {
  gate_scratch_ = DeviceBuffer();
  attention_workspace_ = DeviceBuffer();
  linear_.scratch = nullptr;
  linear_.scratch_bytes = 0;
  moved();
}

float* GpuContext::attention_workspace(size_t bytes) {
  grow(attention_workspace_, bytes);
  return attention_workspace_.as<float>();
}

}  // namespace turbomind
