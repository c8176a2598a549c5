// A GPU whose kernels run in the emulator and whose memory is the host's.
//
// Streams are queues of closures. They run when the host waits: for a stream, an event or the
// freeing of memory; a query runs one. A closure that fails drops those after it in its stream,
// and the host's next wait throws its error.
#include "cuda/emulated_gpu.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "core/error.h"
#include "cuda/emulated_stream.h"
#include "cuda/emulator.h"
#include "cuda/make_gpu.h"

namespace turbomind {

namespace emulator {
namespace {
std::atomic<size_t> device_bytes{size_t{1} << 30};
std::atomic<int64_t> allocation_count{0};
std::atomic<int64_t> capture_count{0};
std::atomic<bool> capture_fails{false}, device_fails{false};
}  // namespace
int64_t allocations() {
  return allocation_count;
}
void set_device_bytes(size_t bytes) {
  device_bytes = bytes;
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
using emulator::StreamQueue;
using emulator::to_handle;
using emulator::to_queue;

constexpr size_t kAlignment = 256;

class Queue;

// One recording of an event.
struct Record {
  Queue* queue;
  bool passed = false;
  Clock::time_point time;
};

struct EmulatedEvent {
  bool timed;
  std::shared_ptr<Record> record;  // the latest
};

struct EmulatedGraph {
  std::vector<std::function<void()>> work;
};

class Queue final : public StreamQueue {
 public:
  explicit Queue(std::recursive_mutex& mutex) : mutex_(mutex) {}

  void enqueue(std::function<void()> work) override {
    const std::lock_guard lock(mutex_);
    if (capturing_)
      capturing_->work.push_back(std::move(work));
    else
      items_.push_back({std::move(work), nullptr});
  }
  void record(std::shared_ptr<Record> record) { items_.push_back({nullptr, std::move(record)}); }

  void step() {
    if (items_.empty()) return;
    const Item item = std::move(items_.front());
    items_.pop_front();
    if (item.record) {
      item.record->time = Clock::now();
      item.record->passed = true;
      return;
    }
    const emulator::RunningStream running(this);
    try {
      item.work();
    } catch (...) {
      for (Item& rest : items_)
        if (rest.record) rest.record->passed = true;
      items_.clear();
      throw;
    }
  }
  void drain() {
    while (!items_.empty()) step();
  }

  void begin_capture(EmulatedGraph* graph) { capturing_ = graph; }
  bool capturing() const { return capturing_ != nullptr; }

 private:
  struct Item {
    std::function<void()> work;      // or
    std::shared_ptr<Record> record;  // passes
  };
  std::recursive_mutex& mutex_;
  std::deque<Item> items_;
  EmulatedGraph* capturing_ = nullptr;
};

EmulatedEvent& native(EventHandle e) {
  return *reinterpret_cast<EmulatedEvent*>(e);
}
EmulatedGraph& native(GraphHandle g) {
  return *reinterpret_cast<EmulatedGraph*>(g);
}

class EmulatedGpu final : public Gpu {
 public:
  EmulatedGpu() : info_(read_info(0)) {}

  GpuKind kind() const override { return GpuKind::emulated; }
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

  void* allocate(size_t bytes) override { return allocate(bytes, false); }
  void* allocate_pinned(size_t bytes) override { return allocate(bytes, true); }
  void free(void* p) noexcept override { release(p); }
  void free_pinned(void* p) noexcept override { release(p); }

  void copy(StreamHandle stream, void* to, const void* from, size_t bytes) override {
    if (bytes == 0) return;
    make_current();
    const std::lock_guard lock(mutex_);
    const bool known = check_range("copy to", to, bytes) & check_range("copy from", from, bytes);
    const auto work = [to, from, bytes] {
      emulator::end_of_step();
      std::memcpy(to, from, bytes);
    };
    submit(stream, work);
    if (known || !stream) return;
    if (to_queue_of(stream).capturing())
      throw_error(ErrorCode::internal, "copy: host memory of a captured copy is not pinned");
    to_queue_of(stream).drain();
  }
  void fill(StreamHandle stream, void* to, uint8_t value, size_t bytes) override {
    if (bytes == 0) return;
    make_current();
    const std::lock_guard lock(mutex_);
    check_range("fill", to, bytes);
    submit(stream, [to, value, bytes] {
      emulator::end_of_step();
      std::memset(to, value, bytes);
    });
  }

  StreamHandle make_stream() override {
    make_current();
    const std::lock_guard lock(mutex_);
    return to_handle(*queues_.insert(new Queue(mutex_)).first);
  }
  void destroy(StreamHandle stream) noexcept override {
    const std::lock_guard lock(mutex_);
    Queue* queue = &to_queue_of(stream);
    drain_quietly(*queue);
    const emulator::RunningStream running(queue);
    emulator::end_of_step();
    queues_.erase(queue);
    delete queue;
  }
  void synchronize(StreamHandle stream) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_may_wait("synchronize");
    check_not_capturing("synchronize", stream);
    if (stream) to_queue_of(stream).drain();
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
    native(event).record = std::make_shared<Record>(Record{nullptr, !stream, Clock::now()});
    if (!stream) return;
    native(event).record->queue = &to_queue_of(stream);
    to_queue_of(stream).record(native(event).record);
  }
  void wait(StreamHandle stream, EventHandle event) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_not_capturing("wait", stream);
    if (native(event).record) submit(stream, [r = native(event).record] { pass(*r); });
  }
  bool query(EventHandle event) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_may_wait("query");
    const std::shared_ptr<Record> record = native(event).record;
    if (record && !record->passed) record->queue->step();
    return !record || record->passed;
  }
  void synchronize(EventHandle event) override {
    make_current();
    const std::lock_guard lock(mutex_);
    check_may_wait("synchronize");
    const std::shared_ptr<Record> record = native(event).record;
    if (record) pass(*record);
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
      to_queue_of(stream).begin_capture(graph.get());
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
  struct Allocation {
    size_t bytes;
    bool pinned;
  };

  static Queue& to_queue_of(StreamHandle stream) { return static_cast<Queue&>(*to_queue(stream)); }

  static void submit(StreamHandle stream, std::function<void()> work) {
    if (stream)
      to_queue(stream)->enqueue(std::move(work));
    else
      work();
  }

  // Runs the record's stream until the record has passed.
  static void pass(Record& record) {
    while (!record.passed) record.queue->step();
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

  // Returns whether the range is in memory of this GPU; throws if it is partly outside.
  bool check_range(const char* call, const void* p, size_t bytes) const {
    const uint8_t* begin = static_cast<const uint8_t*>(p);
    auto it = allocations_.upper_bound(begin);
    if (it == allocations_.begin()) return false;
    --it;
    const size_t offset = static_cast<size_t>(begin - it->first);
    if (offset >= it->second.bytes) return false;
    if (bytes > it->second.bytes - offset)
      throw_error(ErrorCode::internal, call, ": ", bytes, " bytes at offset ", offset,
                  " of an allocation of ", it->second.bytes);
    return true;
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
    allocations_[static_cast<uint8_t*>(p)] = {bytes, pinned};
    if (!pinned) allocated_ += bytes;
    return p;
  }

  void release(void* p) noexcept {
    if (!p) return;
    const std::lock_guard lock(mutex_);
    if (capturing_thread_ == std::this_thread::get_id()) freed_in_capture_ = true;
    for (Queue* queue : queues_) drain_quietly(*queue);
    emulator::end_of_all_steps();
    const auto it = allocations_.find(static_cast<uint8_t*>(p));
    if (it == allocations_.end()) std::abort();  // not ours, or freed twice
    if (!it->second.pinned) allocated_ -= it->second.bytes;
    allocations_.erase(it);
    std::free(p);
  }

  static void drain_quietly(Queue& queue) noexcept {
    try {
      queue.drain();
    } catch (...) {  // free and destroy of a real device report nothing either
    }
  }

  const GpuInfo info_;
  std::recursive_mutex mutex_;
  std::set<Queue*> queues_;
  std::map<const uint8_t*, Allocation> allocations_;
  size_t allocated_ = 0;
  std::thread::id capturing_thread_;
  bool freed_in_capture_ = false;  // reported at the end of the capture
};

}  // namespace

int count_gpus() {
  return 1;
}

GpuInfo read_info(int) {
  GpuInfo info;
  info.name = "emulated GPU";
  info.major = 9;
  info.multiprocessors = 4;
  info.shared_bytes = emulator::kMaxSharedBytes;
  info.l2_bytes = size_t{1} << 20;
  info.total_bytes = emulator::device_bytes;
  return info;
}

std::unique_ptr<Gpu> make_gpu(int) {
  return std::make_unique<EmulatedGpu>();
}

}  // namespace cuda_emulated
}  // namespace turbomind
