#include "engine/event.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

namespace turbomind {

Waker::Waker() {
  int fds[2];
  if (pipe2(fds, O_NONBLOCK | O_CLOEXEC) != 0) {
    throw_error(ErrorCode::internal, "waker: cannot create a pipe: ", std::strerror(errno));
  }
  read_fd_ = fds[0];
  write_fd_ = fds[1];
}

Waker::~Waker() {
  ::close(read_fd_);
  ::close(write_fd_);
}

std::vector<uint64_t> Waker::drain() {
  std::lock_guard lock(mutex_);
  if (signalled_) {
    char byte;
    while (::read(read_fd_, &byte, 1) < 0 && errno == EINTR) {
    }
    signalled_ = false;
  }
  known_.clear();
  return std::exchange(ready_, {});
}

void Waker::post(uint64_t request_id) {
  std::lock_guard lock(mutex_);
  if (ready_.size() == ready_.capacity()) ready_.reserve(2 * ready_.size() + 8);
  if (known_.insert(request_id).second) ready_.push_back(request_id);
  signal_locked();
}

void Waker::wake() {
  std::lock_guard lock(mutex_);
  signal_locked();
}

void Waker::signal_locked() {
  if (signalled_) return;
  const char byte = 1;
  while (::write(write_fd_, &byte, 1) < 0 && errno == EINTR) {
  }
  signalled_ = true;
}

void Request::cancel_choice(int choice) {
  if (choice < 0 || choice >= kMaxChoices)
    throw_error(ErrorCode::invalid_request, "choice: got ", choice, ", expected 0 to ",
                kMaxChoices - 1);
  cancelled_choices_[choice / 64].fetch_or(uint64_t{1} << (choice % 64), std::memory_order_relaxed);
  any_choice_cancelled_.store(true, std::memory_order_release);
}

bool Request::wait(double seconds) {
  constexpr double kForever = 3.2e8;  // seconds; a longer wait would overflow the clock
  if (getpid() != process_)
    throw_error(ErrorCode::closed, "request ", id_,
                ": the process was forked; its parent has the engine");
  std::unique_lock lock(mutex_);
  const auto ready = [this] { return !events_.empty() || done_; };
  if (seconds < 0 || seconds > kForever) {
    ready_.wait(lock, ready);
    return true;
  }
  return ready_.wait_for(lock, std::chrono::duration<double>(seconds), ready);
}

std::vector<Event> Request::drain() {
  std::lock_guard lock(mutex_);
  if (terminal_posted_) done_ = true;
  return std::exchange(events_, {});
}

bool Request::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

void Request::publish(std::vector<Event>&& events) {
  if (events.empty()) return;
  {
    std::lock_guard lock(mutex_);
    if (terminal_posted_) {
      throw_error(ErrorCode::internal, "request ", id_, ": event after the terminal one");
    }
    for (size_t i = 0; i < events.size(); ++i) {
      if (events[i].terminal && i + 1 != events.size()) {
        throw_error(ErrorCode::internal, "request ", id_, ": the terminal event is not the last");
      }
    }
    const double now =
        std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    for (Event& e : events) e.seconds = now;
    // Everything that needs memory comes first. A reader that gets the id from the waker waits for
    // this lock in drain(), so it finds the events.
    const size_t all = events_.size() + events.size();
    if (!events_.empty() && all > events_.capacity()) events_.reserve(2 * all);
    if (waker_) waker_->post(id_);
    terminal_posted_ = events.back().terminal;
    if (events_.empty()) {
      events_ = std::move(events);
    } else {
      for (Event& e : events) events_.push_back(std::move(e));
    }
  }
  ready_.notify_all();  // after the lock, or a woken reader would block on it
}

}  // namespace turbomind
