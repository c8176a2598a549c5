// A GPU, real or emulated: memory, streams, events, graphs. It needs no header of the CUDA toolkit.
// Kernels are launched by launch() of cuda/kernel.h.
//
// Every call throws Error(internal) with the call, the error's name and its text. Any thread may
// call. A thread that launches kernels calls make_current() first; the calls here do so themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "cuda/types.h"

namespace turbomind {

// `emulated` runs the same kernels on the host (cuda/emulator.h). Its streams run only when the
// host waits for them, so a host that reads too early, or overwrites the source of a pending copy,
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
  size_t shared_bytes = 0;  // most shared memory of a block
  size_t l2_bytes = 0;
  size_t total_bytes = 0;
};

// Properties of a GPU that decide how work is cut into blocks.
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
  virtual int index() const = 0;
  virtual const GpuInfo& info() const = 0;
  virtual void make_current() = 0;
  virtual size_t free_bytes() = 0;
  // Sets if kernels launched later, captured ones included, may start while the one before them
  // ends (cuda/kernel.h); the default is true where the device can and the environment does not
  // forbid it (cuda/gpu_switches.h). Returns the mode that applies; it is false in the emulator.
  virtual bool set_overlap(bool on) = 0;

  // Lets kernels of this GPU use memory of another one of the same kind from then on. Returns false
  // where they cannot. A GPU has access to itself, and every GPU to pinned memory.
  virtual bool enable_access(const Gpu& other) = 0;

  // Allocates device memory, aligned to 256 bytes, of undefined contents (NaN in the emulator).
  // Zero bytes: null. The error of a lack of memory has the bytes asked for and those free. free()
  // waits for the device.
  virtual void* allocate(size_t bytes) = 0;
  virtual void free(void* p) noexcept = 0;
  virtual void* allocate_pinned(size_t bytes) = 0;
  virtual void free_pinned(void* p) noexcept = 0;

  // Copy and fill in the stream's order. Host memory should be pinned, else the call may wait.
  virtual void copy(StreamHandle stream, void* to, const void* from, size_t bytes) = 0;
  virtual void fill(StreamHandle stream, void* to, uint8_t value, size_t bytes) = 0;

  virtual StreamHandle make_stream() = 0;
  virtual void destroy(StreamHandle stream) noexcept = 0;
  virtual void synchronize(StreamHandle stream) = 0;

  // Makes an event. A `timed` one is slower, and elapsed_ms() can read it.
  virtual EventHandle make_event(bool timed) = 0;
  virtual void destroy(EventHandle event) noexcept = 0;
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  virtual void wait(StreamHandle stream, EventHandle event) = 0;  // the stream, not the host
  virtual bool query(EventHandle event) = 0;  // true if it has passed or was never recorded
  virtual void synchronize(EventHandle event) = 0;
  virtual float elapsed_ms(EventHandle begin, EventHandle end) = 0;  // both timed and passed

  // Captures the work that `submit` puts into the stream as a graph, without running it. Kernel
  // parameters and addresses are frozen. `submit` must not allocate, use events or wait, and host
  // memory must be pinned.
  virtual GraphHandle capture(StreamHandle stream, const std::function<void()>& submit) = 0;
  virtual void launch(GraphHandle graph, StreamHandle stream) = 0;
  virtual void destroy(GraphHandle graph) noexcept = 0;
};

// Returns the number of GPUs; if there is none, `why` (may be null) gets "no CUDA device: ...".
int gpu_count(GpuKind kind, std::string* why = nullptr);
// Returns the properties of a GPU without opening it. Throws Error(invalid_request) for an index
// out of range.
GpuInfo gpu_info(GpuKind kind, int index);
// Opens a GPU. Throws Error(invalid_request) for an index out of range, Error(internal) for a GPU
// that this build has no kernels for or that does not run them.
std::unique_ptr<Gpu> open_gpu(GpuKind kind, int index);

// ---- Owners of memory, streams, events and graphs. They move, and must not outlive their Gpu.

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
