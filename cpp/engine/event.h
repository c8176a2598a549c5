// What a request reports. Readers wake at most once per step and drain in bulk.
#pragma once

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
#include "sampling/sampling_result.h"

namespace turbomind {

struct Event {
  int choice = 0;
  std::vector<int32_t> token_ids;
  std::vector<TokenLogprobs> logprobs;  // empty, or one per token id
  int64_t progress_done = 0;            // prompt tokens whose KV exists (reused ones included)
  int64_t progress_total = 0;           // > 0 in progress events only
  FinishReason finish = FinishReason::none;
  bool terminal = false;  // last event of the request (all choices finished)
  ErrorCode error_code = ErrorCode::internal;
  std::string error;   // finish == error
  double seconds = 0;  // when it was published, on the monotonic clock
  // Filled in a choice's finish event:
  int64_t prompt_tokens = 0;
  int64_t reused_tokens = 0;   // prompt tokens whose KV was not computed for this request
  int64_t loaded_tokens = 0;   // of them, brought up from a lower tier for this request
  int64_t foreign_tokens = 0;  // of them, computed under another numerics fingerprint
};

// Lets one reader (an asyncio loop) wait for many requests: a file descriptor that becomes readable
// at most once per step, and the ids of the requests with news.
class Waker {
 public:
  Waker();
  ~Waker();
  int fd() const { return read_fd_; }
  std::vector<uint64_t> drain();   // clears the descriptor; ids in order of news, without repeats
  void post(uint64_t request_id);  // engine thread; the descriptor is written once until drained
  void wake();                     // makes the descriptor readable without an id
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

 private:
  void signal_locked();

  std::mutex mutex_;
  std::vector<uint64_t> ready_;
  std::unordered_set<uint64_t> known_;  // what is in ready_
  bool signalled_ = false;
  int read_fd_ = -1, write_fd_ = -1;
};

// Shared by the submitter and the engine thread.
class Request {
 public:
  Request(uint64_t id, std::shared_ptr<Waker> waker) : id_(id), waker_(std::move(waker)) {}
  uint64_t id() const { return id_; }

  // Any thread, any number of times. The terminal event still comes, once.
  void cancel() { cancel_.store(true, std::memory_order_relaxed); }
  bool cancelled() const { return cancel_.load(std::memory_order_relaxed); }
  const std::atomic<bool>* cancel_flag() const { return &cancel_; }

  // Waits until there are events or the terminal one was already drained. seconds < 0: for ever.
  // Returns false on time-out.
  bool wait(double seconds);
  std::vector<Event> drain();
  bool done() const;  // the terminal event has been drained

  // Results of RequestKind::score and ::logits, valid after the terminal event.
  std::vector<float> scores;  // [len - 1]
  std::vector<float> logits;  // [len, vocab]

  // Engine thread: publish what this step produced; called at most once per step. Throws with
  // nothing published, so it can be tried again.
  void publish(std::vector<Event>&& events);

 private:
  const uint64_t id_;
  std::atomic<bool> cancel_{false};
  std::shared_ptr<Waker> waker_;
  mutable std::mutex mutex_;
  std::condition_variable ready_;
  std::vector<Event> events_;
  bool terminal_posted_ = false;
  bool done_ = false;
};

}  // namespace turbomind
