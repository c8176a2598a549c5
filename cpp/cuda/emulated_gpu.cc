// A GPU whose kernels run in the emulator and whose memory is the host's. When its streams run is
// decided in cuda/emulated/streams.h.
#include "cuda/emulated_gpu.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cuda/emulated/memory_map.h"
#include "cuda/emulated/streams.h"
#include "cuda/emulated_stream.h"
#include "cuda/emulator.h"
#include "cuda/make_gpu.h"

namespace turbomind {

namespace emulator {
namespace {
std::atomic<size_t> device_bytes{size_t{1} << 30};
std::atomic<int> device_count{4};
std::atomic<int64_t> allocation_count{0};
std::atomic<int64_t> capture_count{0};
std::atomic<bool> capture_fails{false}, device_fails{false};
// By device, where it has its own; guarded by the lock of the streams.
std::map<int, size_t>& bytes_by_device() {
  static auto& bytes = *new std::map<int, size_t>;
  return bytes;
}
size_t bytes_of(int device) {
  const std::lock_guard lock(Streams::get().mutex());
  const auto own = bytes_by_device().find(device);
  return own == bytes_by_device().end() ? device_bytes.load() : own->second;
}
}  // namespace
int64_t allocations() {
  return allocation_count;
}
void set_device_bytes(size_t bytes) {
  const std::lock_guard lock(Streams::get().mutex());
  device_bytes = bytes;
  bytes_by_device().clear();
}
void set_device_bytes(int device, size_t bytes) {
  const std::lock_guard lock(Streams::get().mutex());
  bytes_by_device()[device] = bytes;
}
void set_device_count(int count) {
  device_count = count;
}
void set_peer_access(bool on) {
  const std::lock_guard lock(Streams::get().mutex());
  MemoryMap::get().set_peer_access(on);
}
void set_wait_limit(double seconds) {
  const std::lock_guard lock(Streams::get().mutex());
  Streams::get().set_wait_limit(seconds);
}
void set_capture_fails(bool fails) {
  capture_fails = fails;
}
void set_device_fails(bool fails) {
  device_fails = fails;
}
int64_t captures() {
  return capture_count;
}
}  // namespace emulator

namespace cuda_emulated {
namespace {

using Clock = std::chrono::steady_clock;
using emulator::GraphWork;
using emulator::MemoryMap;
using emulator::Queue;
using emulator::Record;
using emulator::Streams;
using emulator::to_handle;
using emulator::to_queue;

constexpr size_t kAlignment = 256;

struct EmulatedEvent {
  bool timed;
  std::shared_ptr<Record> record;  // the latest
};

struct EmulatedGraph {
  GraphWork work;
};

EmulatedEvent& native(EventHandle e) {
  return *reinterpret_cast<EmulatedEvent*>(e);
}
EmulatedGraph& native(GraphHandle g) {
  return *reinterpret_cast<EmulatedGraph*>(g);
}

class EmulatedGpu final : public Gpu {
 public:
  explicit EmulatedGpu(int index)
      : index_(index),
        info_(read_info(index)),
        streams_(Streams::get()),
        mutex_(streams_.mutex()) {}

  GpuKind kind() const override { return GpuKind::emulated; }
  int index() const override { return index_; }
  const GpuInfo& info() const override { return info_; }
  void make_current() override {
    emulator::thread_has_gpu() = true;
    if (emulator::device_fails) throw_error(ErrorCode::internal, "the GPU was asked to fail");
  }
  bool set_overlap(bool) override { return false; }
  size_t free_bytes() override {
    make_current();
    const std::lock_guard lock(mutex_);
    return info_.total_bytes - allocated_;
  }

  bool enable_access(const Gpu& other) override {
    make_current();
    if (other.index() == index_) return true;
    const std::lock_guard lock(mutex_);
    if (!MemoryMap::get().can_access_peers()) return false;
    MemoryMap::get().enable_access(index_, other.index());
    return true;
  }

  void* allocate(size_t bytes) override { return allocate(bytes, false); }
  void* allocate_pinned(size_t bytes) override { return allocate(bytes, true); }
  void free(void* p) noexcept override { release(p); }
  void free_pinned(void* p) noexcept override { release(p); }

  void copy(StreamHandle stream, void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    make_current();
    const std::lock_guard lock(mutex_);
    const MemoryMap& map = MemoryMap::get();
    const bool known =
        map.has_range("copy to", to, bytes) & map.has_range("copy from", from, bytes);
    const auto work = [to, from, bytes] {
      emulator::end_of_step();
      std::memcpy(to, from, bytes);
    };
    submit(stream, work);
    if (known || !stream) return;
    if (to_queue_of(stream).capturing())
      throw_error(ErrorCode::internal, "copy: host memory of a captured copy is not pinned");
    streams_.drain(to_queue_of(stream));
  }
  void fill(StreamHandle stream, void* to, uint8_t value, size_t bytes) override {
    if (bytes == 0) return;
    make_current();
    const std::lock_guard lock(mutex_);
    MemoryMap::get().has_range("fill", to, bytes);
    submit(stream, [to, value, bytes] {
      emulator::end_of_step();
      std::memset(to, value, bytes);
    });
  }

  StreamHandle make_stream() override {
    make_current();
    const std::lock_guard lock(mutex_);
    return to_handle(streams_.make(index_));
  }
  void destroy(StreamHandle stream) noexcept override {
    const std::lock_guard lock(mutex_);
    streams_.destroy(&to_queue_of(stream));
  }
  void synchronize(StreamHandle stream) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_may_wait("synchronize");
    check_not_capturing("synchronize", stream);
    if (stream) streams_.drain(to_queue_of(stream));
  }

  EventHandle make_event(bool timed) override {
    make_current();
    return reinterpret_cast<EventHandle>(new EmulatedEvent{timed, nullptr});
  }
  void destroy(EventHandle event) noexcept override { delete &native(event); }
  void record(EventHandle event, StreamHandle stream) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_not_capturing("record", stream);
    native(event).record = std::make_shared<Record>(Record{nullptr, !stream, Clock::now(), {}});
    if (stream) to_queue_of(stream).record(native(event).record);
  }
  void wait(StreamHandle stream, EventHandle event) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_not_capturing("wait", stream);
    const std::shared_ptr<Record>& record = native(event).record;
    if (!record || record->passed) return;
    if (stream)
      to_queue_of(stream).wait(record);
    else
      streams_.pass(*record);
  }
  bool query(EventHandle event) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_may_wait("query");
    const std::shared_ptr<Record> record = native(event).record;
    if (record && !record->passed) streams_.step(*record);
    return !record || record->passed;
  }
  void synchronize(EventHandle event) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_may_wait("synchronize");
    const std::shared_ptr<Record> record = native(event).record;
    if (record) streams_.pass(*record);
  }
  float elapsed_ms(EventHandle begin, EventHandle end) override {
    make_current();
    const std::lock_guard lock(mutex_);
    if (!native(begin).timed || !native(end).timed)
      throw_error(ErrorCode::internal, "elapsed_ms: an event is not timed");
    const auto b = native(begin).record, e = native(end).record;
    if (!b || !e || !b->passed || !e->passed)
      throw_error(ErrorCode::internal, "elapsed_ms: an event has not passed");
    return std::chrono::duration<float, std::milli>(e->time - b->time).count();
  }

  GraphHandle capture(StreamHandle stream, const std::function<void()>& submit) override {
    make_current();
    auto graph = std::make_unique<EmulatedGraph>();
    {
      const std::lock_guard lock(mutex_);
      if (!stream) throw_error(ErrorCode::internal, "capture: got the default stream");
      check_not_capturing("capture", stream);
      to_queue_of(stream).begin_capture(&graph->work);
      capturing_thread_ = std::this_thread::get_id();
      freed_in_capture_ = false;
    }
    try {
      submit();
    } catch (...) {
      end_capture(stream);
      throw;
    }
    end_capture(stream);
    {
      const std::lock_guard lock(mutex_);
      streams_.require_idle("capture: made", index_);
    }
    if (freed_in_capture_) throw_error(ErrorCode::internal, "capture: memory was freed meanwhile");
    ++emulator::capture_count;
    if (emulator::capture_fails) throw_error(ErrorCode::internal, "capture: asked to fail");
    return reinterpret_cast<GraphHandle>(graph.release());
  }
  void launch(GraphHandle graph, StreamHandle stream) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_not_capturing("launch of a graph", stream);
    for (const auto& work : native(graph).work) submit(stream, work);
  }
  void destroy(GraphHandle graph) noexcept override { delete &native(graph); }

 private:
  static Queue& to_queue_of(StreamHandle stream) { return static_cast<Queue&>(*to_queue(stream)); }

  static void submit(StreamHandle stream, std::function<void()> work) {
    if (stream)
      to_queue(stream)->enqueue(std::move(work));
    else
      work();
  }

  static void check_not_capturing(const char* call, StreamHandle stream) {
    if (stream && to_queue_of(stream).capturing())
      throw_error(ErrorCode::internal, call, ": the stream is being captured");
  }

  // Throws in a thread that captures: it must not call functions that may wait for the device.
  void check_may_wait(const char* call) const {
    if (capturing_thread_ == std::this_thread::get_id())
      throw_error(ErrorCode::internal, call, ": a stream is being captured");
  }

  void end_capture(StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    to_queue_of(stream).begin_capture(nullptr);
    capturing_thread_ = {};
  }

  void* allocate(size_t bytes, bool pinned) {
    if (bytes == 0) return nullptr;
    make_current();
    const std::lock_guard lock(mutex_);
    check_may_wait("allocate");
    if (!pinned && bytes > info_.total_bytes - allocated_)
      throw_error(ErrorCode::internal, "out of device memory: asked for ", bytes, " bytes, ",
                  info_.total_bytes - allocated_, " of ", info_.total_bytes, " are free");
    void* p = nullptr;
    if (posix_memalign(&p, kAlignment, bytes) != 0)
      throw_error(ErrorCode::internal, "out of host memory: asked for ", bytes, " bytes");
    std::memset(p, 0xff, bytes);
    ++emulator::allocation_count;
    MemoryMap::get().add(p, {index_, bytes, pinned});
    if (!pinned) allocated_ += bytes;
    return p;
  }

  void release(void* p) noexcept {
    if (!p) return;
    const std::lock_guard lock(mutex_);
    if (capturing_thread_ == std::this_thread::get_id()) freed_in_capture_ = true;
    streams_.drain_device(index_);
    emulator::end_of_all_steps();
    const MemoryMap::Allocation allocation = MemoryMap::get().remove(p);
    if (!allocation.pinned) allocated_ -= allocation.bytes;
    std::free(p);
  }

  const int index_;
  const GpuInfo info_;
  Streams& streams_;
  std::recursive_mutex& mutex_;
  size_t allocated_ = 0;
  std::thread::id capturing_thread_;
  bool freed_in_capture_ = false;  // reported at the end of the capture
};

}  // namespace

int count_gpus() {
  return emulator::device_count;
}

GpuInfo read_info(int index) {
  GpuInfo info;
  info.name = "emulated GPU";
  info.major = 9;
  info.multiprocessors = 4;
  info.shared_bytes = emulator::kMaxSharedBytes;
  info.l2_bytes = size_t{1} << 20;
  info.total_bytes = emulator::bytes_of(index);
  return info;
}

std::unique_ptr<Gpu> make_gpu(int index) {
  return std::make_unique<EmulatedGpu>(index);
}

}  // namespace cuda_emulated
}  // namespace turbomind
