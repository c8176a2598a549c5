// The queue that a StreamHandle of the emulator points to.
#pragma once

#include <functional>

#include "cuda/types.h"

namespace turbomind::emulator {

class StreamQueue {
 public:
  virtual ~StreamQueue() = default;
  // Queues `work`, which runs in the stream's order, or adds it to the graph that is captured.
  virtual void enqueue(std::function<void()> work) = 0;
  virtual int device() const = 0;
  // Notes that work of the stream waits for another stream of its device.
  virtual void wait_within_device() = 0;
};

// Thrown by a launch that waits for another stream and has changed nothing yet: it stays the first
// of its stream and is tried again.
struct NotReady {};

// While one lives, waits of kernels for other streams end as if they had lasted too long.
class TimeRunsOut {
 public:
  TimeRunsOut() { now() = true; }
  ~TimeRunsOut() { now() = false; }
  TimeRunsOut(const TimeRunsOut&) = delete;
  TimeRunsOut& operator=(const TimeRunsOut&) = delete;
  static bool& now() {
    static thread_local bool runs_out = false;
    return runs_out;
  }
};

// True once this thread has used an emulated GPU. Launches on a real one need Gpu::make_current
// first.
inline bool& thread_has_gpu() {
  static thread_local bool has = false;
  return has;
}

// The stream whose work this thread runs; null: the default stream.
inline StreamQueue*& running_stream() {
  static thread_local StreamQueue* stream = nullptr;
  return stream;
}

// Sets running_stream() for its lifetime.
class RunningStream {
 public:
  explicit RunningStream(StreamQueue* stream) : before_(running_stream()) {
    running_stream() = stream;
  }
  ~RunningStream() { running_stream() = before_; }
  RunningStream(const RunningStream&) = delete;
  RunningStream& operator=(const RunningStream&) = delete;

 private:
  StreamQueue* const before_;
};

inline StreamQueue* to_queue(StreamHandle stream) {
  return reinterpret_cast<StreamQueue*>(stream);
}
inline StreamHandle to_handle(StreamQueue* queue) {
  return reinterpret_cast<StreamHandle>(queue);
}

}  // namespace turbomind::emulator
