// A GPU, real or emulated, without a header of the toolkit: memory, streams, events, graphs.
//
// Every call throws Error(internal) with the call, the error's name and its text. A thread that
// launches kernels itself calls make_current() first; the calls here do so themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cuda/types.h"

namespace turbomind {

// `emulated` runs the same kernels on the host (cuda/emulator.h). Its streams do nothing until the
// host waits for them, so a host that reads too early, or rewrites what a copy still has to read,
// gets wrong results.
enum class GpuKind : uint8_t { cuda, emulated };

constexpr const char* gpu_kind_name(GpuKind kind) {
  return kind == GpuKind::cuda ? "cuda" : "emulated";
}

struct GpuInfo {
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
  size_t shared_bytes = 0;  // a block can have
  size_t l2_bytes = 0;
  size_t total_bytes = 0;
};

// What of a GPU decides how work is cut into blocks.
struct GpuLimits {
  int multiprocessors;
  size_t shared_bytes;  // of a block
};

struct OpaqueEvent;
struct OpaqueGraph;
using EventHandle = OpaqueEvent*;
using GraphHandle = OpaqueGraph*;

class Gpu {
 public:
  virtual ~Gpu() = default;
  virtual GpuKind kind() const = 0;
  virtual const GpuInfo& info() const = 0;
  virtual void make_current() = 0;
  virtual size_t free_bytes() = 0;
  // Whether kernels launched from now on, captured ones included, may start while the one before
  // them ends (cuda/kernel.h): the default where the device can. Returns what holds now; the
  // emulator runs one after another.
  virtual bool set_overlap(bool on) = 0;

  // Device memory is aligned to 256 bytes, its contents undefined (NaN in the emulator). Out of
  // memory names the bytes asked for and those free. Zero bytes: null. Freeing waits for the
  // device.
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* p) noexcept = 0;
  virtual void* allocate_pinned(size_t bytes) = 0;
  virtual void free_pinned(void* p) noexcept = 0;

  // In the stream's order. Host memory is pinned, else the call may wait for the copy.
  virtual void copy(StreamHandle stream, void* to, const void* from, size_t bytes) = 0;
  virtual void fill(StreamHandle stream, void* to, uint8_t value, size_t bytes) = 0;

  virtual StreamHandle make_stream() = 0;
  virtual void destroy(StreamHandle stream) noexcept = 0;
  virtual void synchronize(StreamHandle stream) = 0;

  // Events that only order work are cheaper than `timed` ones.
  virtual EventHandle make_event(bool timed) = 0;
  virtual void destroy(EventHandle event) noexcept = 0;
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  virtual void wait(StreamHandle stream, EventHandle event) = 0;  // the stream, not the host
  virtual bool query(EventHandle event) = 0;  // whether it has passed; never recorded: true
  virtual void synchronize(EventHandle event) = 0;
  virtual float elapsed_ms(EventHandle begin, EventHandle end) = 0;  // both timed, and passed

  // What `submit` puts into the stream becomes the graph and does not run. Kernel parameters and
  // addresses are frozen. No allocation, event or waiting inside; host memory must be pinned.
  virtual GraphHandle capture(StreamHandle stream, const std::function<void()>& submit) = 0;
  virtual void launch(GraphHandle graph, StreamHandle stream) = 0;
  virtual void destroy(GraphHandle graph) noexcept = 0;
};

// How many there are; if none, `why` (may be null) gets "no CUDA device: ...".
int gpu_count(GpuKind kind, std::string* why = nullptr);
// What open_gpu's would say of itself. Throws Error(invalid_request) for an index out of range.
GpuInfo gpu_info(GpuKind kind, int index);
// Throws Error(invalid_request) for an index out of range, Error(internal) for a GPU this build has
// no kernels for or that does not run them.
std::unique_ptr<Gpu> open_gpu(GpuKind kind, int index);

// ---- Owners. They move, and must not outlive their Gpu.

template <typename Handle, void (*destroy)(Gpu&, Handle)>
class GpuOwner {
 public:
  GpuOwner() = default;
  GpuOwner(Gpu& gpu, Handle handle) : gpu_(&gpu), handle_(handle) {}
  ~GpuOwner() {
    if (handle_) destroy(*gpu_, handle_);
  }
  GpuOwner(GpuOwner&& o) noexcept : gpu_(o.gpu_), handle_(std::exchange(o.handle_, nullptr)) {}
  GpuOwner& operator=(GpuOwner&& o) noexcept {
    if (handle_) destroy(*gpu_, handle_);
    gpu_ = o.gpu_;
    handle_ = std::exchange(o.handle_, nullptr);
    return *this;
  }
  Handle handle() const { return handle_; }
  Gpu& gpu() const { return *gpu_; }
  explicit operator bool() const { return handle_ != nullptr; }

 private:
  Gpu* gpu_ = nullptr;
  Handle handle_ = nullptr;
};

namespace gpu_owner {
inline void* allocate_device(Gpu& gpu, size_t bytes) {
  return gpu.allocate(bytes);
}
inline void free_device(Gpu& gpu, void* p) {
  gpu.free(p);
}
inline void* allocate_pinned(Gpu& gpu, size_t bytes) {
  return gpu.allocate_pinned(bytes);
}
inline void free_pinned(Gpu& gpu, void* p) {
  gpu.free_pinned(p);
}
template <typename Handle>
void destroy(Gpu& gpu, Handle handle) {
  gpu.destroy(handle);
}
}  // namespace gpu_owner

template <void* (*allocate)(Gpu&, size_t), void (*release)(Gpu&, void*)>
class GpuMemory : public GpuOwner<void*, release> {
 public:
  GpuMemory() = default;
  GpuMemory(Gpu& gpu, size_t bytes)
      : GpuOwner<void*, release>(gpu, allocate(gpu, bytes)), bytes_(bytes) {}
  template <typename T>
  T* as() const {
    return static_cast<T*>(this->handle());
  }
  uint8_t* data() const { return as<uint8_t>(); }
  size_t size() const { return *this ? bytes_ : 0; }

 private:
  size_t bytes_ = 0;
};
using DeviceBuffer = GpuMemory<gpu_owner::allocate_device, gpu_owner::free_device>;
using PinnedBuffer = GpuMemory<gpu_owner::allocate_pinned, gpu_owner::free_pinned>;

class GpuStream : public GpuOwner<StreamHandle, gpu_owner::destroy<StreamHandle>> {
 public:
  GpuStream() = default;
  explicit GpuStream(Gpu& gpu) : GpuOwner(gpu, gpu.make_stream()) {}
  void synchronize() const { gpu().synchronize(handle()); }
};

class GpuEvent : public GpuOwner<EventHandle, gpu_owner::destroy<EventHandle>> {
 public:
  GpuEvent() = default;
  explicit GpuEvent(Gpu& gpu, bool timed = false) : GpuOwner(gpu, gpu.make_event(timed)) {}
  void record(const GpuStream& stream) const { gpu().record(handle(), stream.handle()); }
  bool query() const { return gpu().query(handle()); }
  void synchronize() const { gpu().synchronize(handle()); }
};

class GpuGraph : public GpuOwner<GraphHandle, gpu_owner::destroy<GraphHandle>> {
 public:
  GpuGraph() = default;
  GpuGraph(const GpuStream& stream, const std::function<void()>& submit)
      : GpuOwner(stream.gpu(), stream.gpu().capture(stream.handle(), submit)) {}
  void launch(const GpuStream& stream) const { gpu().launch(handle(), stream.handle()); }
};

}  // namespace turbomind
