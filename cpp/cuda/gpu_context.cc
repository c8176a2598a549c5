#include "cuda/gpu_context.h"

#include <atomic>

namespace turbomind {

namespace {

// Returns which switches are not at their defaults.
std::string text_of(const GpuSwitches& switches) {
  std::string text;
  if (switches.rank_waits)
    text += "; TM_CUDA_RANK_WAITS is 1";
  else if (!switches.overlap)
    text += "; TM_CUDA_OVERLAP is 0";
  if (!switches.graphs) text += "; TM_CUDA_GRAPHS is 0";
  return text;
}

constexpr size_t kLibraryWorkspace = 32 << 20;  // what cuBLASLt's heuristics want on Hopper
constexpr size_t kPinnedSlab = 64 << 20;        // pinning is slow: a little at a time
constexpr size_t kPinnedAhead = 512 << 20;      // and in the way of steps: not while pages wait

struct PinnedBlock {
  PinnedBlock(std::shared_ptr<Gpu> g, size_t bytes) : gpu(std::move(g)), buffer(*gpu, bytes) {}
  const std::shared_ptr<Gpu> gpu;
  const PinnedBuffer buffer;
};

}  // namespace

GpuContext::GpuContext(const GpuOptions& options, const GpuContext* same)
    : switches_(read_gpu_switches()),
      gpu_(same ? same->gpu_ : open_gpu(options.kind, options.index)),
      stream_(same && !switches_.rank_waits ? same->stream_ : std::make_shared<GpuStream>(*gpu_)),
      deterministic_(options.deterministic) {
  if (options.deterministic || options.kind == GpuKind::emulated) {
    library_note_ = "our own kernels" + text_of(switches_);
    return;
  }
  library_workspace_ = DeviceBuffer(*gpu_, kLibraryWorkspace);
  std::string why;
  library_ = CublasLt::open(
      options.library_folders, library_workspace_.data(), kLibraryWorkspace,
      [this](const std::string& text) { add_note(text); }, &why);
  library_note_ = (library_ ? library_->path() : why) + text_of(switches_);
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
  stream_->synchronize();
  buffer = DeviceBuffer();  // the old one goes first
  buffer = DeviceBuffer(*gpu_, bytes);
  moved();
}

int GpuContext::next_state_index() {
  static std::atomic<int> count{0};
  return count++;
}

std::unique_ptr<GpuState>& GpuContext::state_slot(int index) {
  if (states_.size() <= static_cast<size_t>(index)) states_.resize(index + 1);
  return states_[index];
}

void GpuContext::release() noexcept {
  for (const std::unique_ptr<GpuState>& state : states_)
    if (state) state->release();
  moved();
}

}  // namespace turbomind
