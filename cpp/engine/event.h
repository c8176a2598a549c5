// Results of a request on their way to its reader: events, the request that queues them, and a
// waker for readers of many requests. Readers wake at most once per step and take all events at
// once.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "sampling/sampling_params.h"
#include "sampling/sampling_result.h"

namespace turbomind {

// One report of a request: tokens of a choice, progress of the prompt, or the end of a choice.
struct Event {
  int choice = 0;
  std::vector<int32_t> token_ids;       // new tokens of the choice
  std::vector<TokenLogprobs> logprobs;  // empty, or one per token id
  int64_t progress_done = 0;            // prompt tokens whose KV exists (reused ones included)
  int64_t progress_total = 0;           // > 0 in progress events only
  FinishReason finish = FinishReason::none;
  bool terminal = false;  // the last event of the request: all choices have finished
  ErrorCode error_code = ErrorCode::internal;
  std::string error;          // finish == error
  double seconds = 0;         // time of publication on the monotonic clock
  int64_t reused_tokens = 0;  // prompt tokens whose KV was not computed for this request; filled
                              // in progress events and in the event that finishes a choice
  // Filled in the event that finishes a choice:
  int64_t prompt_tokens = 0;
  int64_t loaded_tokens = 0;   // of the reused, loaded from a lower tier for this request
  int64_t foreign_tokens = 0;  // of them, computed under another numerics fingerprint
};

// Lets one reader (an asyncio loop) wait for many requests: a file descriptor that becomes readable
// at most once per step, and the ids of the requests with events. Any thread.
class Waker {
 public:
  // Throws Error(internal) when the system has no pipe left.
  Waker();
  ~Waker();
  int fd() const { return read_fd_; }
  // Returns the ids posted since the last call, in order and without repeats, and clears the
  // descriptor.
  std::vector<uint64_t> drain();
  // Engine thread: adds an id. The descriptor is written once until it is drained.
  void post(uint64_t request_id);
  // Makes the descriptor readable without an id.
  void wake();
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

 private:
  void signal_locked();

  std::mutex mutex_;
  std::vector<uint64_t> ready_;
  std::unordered_set<uint64_t> known_;  // the ids in ready_
  bool signalled_ = false;
  int read_fd_ = -1, write_fd_ = -1;
};

// A request as its submitter sees it. Shared by submitter and engine thread.
class Request {
 public:
  Request(uint64_t id, std::shared_ptr<Waker> waker, int priority = 0)
      : id_(id), priority_(priority), waker_(std::move(waker)), process_(getpid()) {}
  uint64_t id() const { return id_; }

  // Asks for the end of the request: within one step, on the CPU within 200 ms. Any thread, any
  // number of times. The terminal event still comes, once.
  void cancel() { cancel_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancel_.load(std::memory_order_relaxed); }
  const std::atomic<bool>* cancel_flag() const { return &cancel_; }
  // Asks for the end of one choice, before the next step that is planned; the others continue. It
  // takes effect once the request has computed its prompt, which the choices share. A choice that
  // the request does not have is ignored. Any thread, any number of times. Throws
  // Error(invalid_request) outside 0..kMaxChoices - 1.
  void cancel_choice(int choice);
  bool choice_cancelled(int choice) const {
    return cancelled_choices_[choice / 64].load(std::memory_order_relaxed) >> (choice % 64) & 1;
  }
  bool any_choice_cancelled() const {
    return any_choice_cancelled_.load(std::memory_order_acquire);
  }

  // Changes the priority (RequestOptions::priority) from the next step on. Any thread, any number
  // of times; the last call wins. Does nothing once the request has ended.
  void set_priority(int priority) { priority_.store(priority, std::memory_order_relaxed); }
  int priority() const { return priority_.load(std::memory_order_relaxed); }

  // Waits for at most `seconds` (< 0: without limit) until there are events or the terminal one has
  // been drained. Returns false on time-out. Throws Error(closed) in a forked child, which has no
  // engine thread.
  bool wait(double seconds);
  // Returns the events since the last call; does not wait.
  std::vector<Event> drain();
  // Returns whether the terminal event has been drained.
  bool done() const;

  // Results of RequestKind::score and ::logits, valid after the terminal event.
  std::vector<float> scores;  // [len - 1]
  std::vector<float> logits;  // [len, vocab]

  // Engine thread: hands over the events of a step, at most once per step. When it throws, nothing
  // is published and the call can be repeated.
  void publish(std::vector<Event>&& events);

 private:
  const uint64_t id_;
  std::atomic<bool> cancel_{false};
  std::atomic<bool> any_choice_cancelled_{false};
  std::array<std::atomic<uint64_t>, kMaxChoices / 64> cancelled_choices_{};
  std::atomic<int> priority_;
  std::shared_ptr<Waker> waker_;
  const pid_t process_;
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Event> events_;
  bool terminal_posted_ = false;
  bool done_ = false;
};

}  // namespace turbomind
