// The streams of all emulated GPUs. Internal to the emulator.
//
// A stream is a queue of closures, which run when the host waits: for the stream, an event or the
// freeing of memory; a query runs one. The GPUs of a machine compute side by side, so where several
// have work, a seed chooses which of them proceeds. Streams of one GPU do not, so that a wait that
// is missing between them shows; they do once a kernel of one waits for a kernel of another one. A
// closure that fails drops those after it in its stream, and the host's next wait throws its error.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda/emulated_stream.h"

namespace turbomind::emulator {

class Queue;

// One recording of an event.
struct Record {
  Queue* queue = nullptr;
  bool passed = false;
  std::chrono::steady_clock::time_point time;
  std::exception_ptr error;  // of the stream, where it failed before the record
};

using GraphWork = std::vector<std::function<void()>>;

class Queue final : public StreamQueue {
 public:
  explicit Queue(int device) : device_(device) {}
  int device() const override { return device_; }
  void wait_within_device() override;
  void enqueue(std::function<void()> work) override;
  void record(std::shared_ptr<Record> record);
  void wait(std::shared_ptr<Record> record);

  void begin_capture(GraphWork* work) { capturing_ = work; }
  bool capturing() const { return capturing_ != nullptr; }

 private:
  friend class Streams;

  struct Item {
    std::function<void()> work;      // or
    std::shared_ptr<Record> record;  // which passes, or
    std::shared_ptr<Record> awaited;
  };
  void add(Item item);
  void run_front();
  void fail(const std::exception_ptr& error);

  const int device_;
  std::deque<Item> items_;
  GraphWork* capturing_ = nullptr;
  std::exception_ptr error_;  // which no wait has thrown yet
  uint64_t tried_ = 0;        // Streams::progress_ when the front was not ready
};

// All functions but mutex() are called with the lock held, once per thread.
class Streams {
 public:
  static Streams& get();

  std::recursive_mutex& mutex() { return mutex_; }
  Queue* make(int device);
  void destroy(Queue* queue) noexcept;

  void drain(Queue& queue);                // the host waits for a stream
  void pass(Record& record);               // or for an event
  void step(Record& record);               // runs something, if anything can run
  void drain_device(int device) noexcept;  // errors are left to the streams' waits
  void note_progress();
  // See set_lazy_loading() of emulated_gpu.h: for calls of a host that may wait for all work. Runs
  // all that can run, and throws where some is left.
  void set_lazy_loading(bool on) { lazy_loading_ = on; }
  bool lazy_loading() const { return lazy_loading_; }
  void require_idle(const std::string& call, int device);
  // From now on the streams of a device run side by side, until one is destroyed.
  void interleave(int device) { interleaved_.insert(device); }

  // See emulated_gpu.h.
  void set_wait_limit(double seconds) { wait_limit_ = seconds; }

 private:
  template <typename Done>
  void run_until(Queue& target, Done done);
  bool advance(Queue& target);
  Queue* ready(Queue& queue) const;
  Queue& choose(const std::vector<Queue*>& queues);
  void take_error(Queue& queue);
  template <typename Done>
  bool wait_for_hosts(Queue& target, Done done);
  void let_time_run_out(Queue& target);

  std::recursive_mutex mutex_;
  std::condition_variable_any changed_;
  std::set<Queue*> queues_;
  std::set<int> interleaved_;  // devices whose streams run side by side
  Queue* favourite_ = nullptr;
  uint64_t progress_ = 1;
  double wait_limit_ = 10;
  bool lazy_loading_ = false;
};

}  // namespace turbomind::emulator
