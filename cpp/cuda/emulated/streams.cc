#include "cuda/emulated/streams.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "cuda/emulated_block.h"
#include "cuda/launch_counters.h"

namespace turbomind::emulator {

using Clock = std::chrono::steady_clock;

void Queue::enqueue(std::function<void()> work) {
  const std::lock_guard lock(Streams::get().mutex());
  if (capturing_)
    capturing_->push_back(std::move(work));
  else
    add({std::move(work), nullptr, nullptr});
}

void Queue::record(std::shared_ptr<Record> record) {
  record->queue = this;
  add({nullptr, std::move(record), nullptr});
}

void Queue::wait(std::shared_ptr<Record> record) {
  add({nullptr, nullptr, std::move(record)});
}

void Queue::add(Item item) {
  items_.push_back(std::move(item));
  Streams::get().note_progress();
}

void Queue::wait_within_device() {
  Streams::get().interleave(device_);
}

void Queue::run_front() {
  Item item = std::move(items_.front());
  items_.pop_front();
  if (item.record) {
    item.record->time = Clock::now();
    item.record->passed = true;
    return;
  }
  if (item.awaited) {
    if (item.awaited->error) fail(item.awaited->error);
    return;
  }
  const RunningStream running(this);
  try {
    item.work();
  } catch (const NotReady&) {
    items_.push_front(std::move(item));
    throw;
  } catch (...) {
    fail(std::current_exception());
  }
}

void Queue::fail(const std::exception_ptr& error) {
  error_ = error;
  for (const Item& item : items_) {
    if (!item.record) continue;
    item.record->passed = true;
    item.record->error = error;
  }
  items_.clear();
}

Streams& Streams::get() {
  static Streams& streams = *new Streams;  // never destroyed: threads may still run at exit
  return streams;
}

Queue* Streams::make(int device) {
  return *queues_.insert(new Queue(device)).first;
}

void Streams::destroy(Queue* queue) noexcept {
  try {
    drain(*queue);
  } catch (...) {  // destroying a stream of a real device reports nothing either
    queue->fail(std::current_exception());
  }
  const RunningStream running(queue);
  end_of_step();
  queues_.erase(queue);
  if (favourite_ == queue) favourite_ = nullptr;
  interleaved_.erase(queue->device());
  delete queue;
}

void Streams::note_progress() {
  ++progress_;
  changed_.notify_all();
}

void Streams::drain(Queue& queue) {
  run_until(queue, [&] { return queue.items_.empty(); });
  take_error(queue);
}

void Streams::pass(Record& record) {
  if (!record.passed) run_until(*record.queue, [&] { return record.passed; });
  if (!record.error) return;
  if (queues_.count(record.queue) > 0) record.queue->error_ = nullptr;  // thrown here
  std::rethrow_exception(std::exchange(record.error, nullptr));
}

void Streams::step(Record& record) {
  Queue& queue = *record.queue;
  advance(queue);
  take_error(queue);
}

void Streams::drain_device(int device) noexcept {
  const std::set<Queue*> all = queues_;
  for (Queue* queue : all) {
    if (queues_.count(queue) == 0 || queue->device() != device) continue;
    try {
      run_until(*queue, [&] { return queue->items_.empty(); });
    } catch (...) {  // freeing memory of a real device reports nothing either
    }
  }
}

void Streams::take_error(Queue& queue) {
  if (queue.error_) std::rethrow_exception(std::exchange(queue.error_, nullptr));
}

template <typename Done>
void Streams::run_until(Queue& target, Done done) {
  while (!done()) {
    if (advance(target)) continue;
    if (!wait_for_hosts(target, done)) let_time_run_out(target);
  }
}

void Streams::require_idle(const std::string& call, int device) {
  if (!lazy_loading_) return;
  for (bool more = true; more;) {
    more = false;
    const std::set<Queue*> all = queues_;
    for (Queue* queue : all) more = (queues_.count(queue) > 0 && advance(*queue)) || more;
  }
  if (!std::all_of(queues_.begin(), queues_.end(), [](Queue* q) { return q->items_.empty(); }))
    throw_error(ErrorCode::internal, call, " on emulated GPU ", device,
                " while work there or elsewhere waits for what is launched later");
}

// Runs one piece of work: of the stream, of one that it waits for, or of one that runs beside it.
// Returns false where none is ready.
bool Streams::advance(Queue& target) {
  const bool interleaved = interleaved_.count(target.device()) > 0;
  std::vector<Queue*> found;
  if (Queue* queue = ready(target)) found.push_back(queue);
  for (Queue* other : queues_) {
    if (other->device() == target.device() && !interleaved) continue;
    Queue* const queue = ready(*other);
    if (queue && std::find(found.begin(), found.end(), queue) == found.end())
      found.push_back(queue);
  }
  while (!found.empty()) {
    Queue& queue = choose(found);
    try {
      queue.run_front();
      note_progress();
      return true;
    } catch (const NotReady&) {
      queue.tried_ = progress_;
      found.erase(std::find(found.begin(), found.end(), &queue));
    }
  }
  const bool first_wait_within = !interleaved && interleaved_.count(target.device()) > 0;
  return first_wait_within && advance(target);
}

// Returns the stream whose next work brings `queue` forward: itself, or the one whose event it
// waits for. Null where there is none now.
Queue* Streams::ready(Queue& queue) const {
  Queue* at = &queue;
  for (size_t hops = 0; hops <= queues_.size(); ++hops) {
    if (at->items_.empty()) return nullptr;
    const std::shared_ptr<Record>& awaited = at->items_.front().awaited;
    if (!awaited || awaited->passed) return at->tried_ == progress_ ? nullptr : at;
    at = awaited->queue;
  }
  return nullptr;  // they wait for each other
}

// One device may run far ahead of the others before they do anything.
Queue& Streams::choose(const std::vector<Queue*>& queues) {
  if (queues.size() == 1) return *queues[0];
  Random random(next_seed());
  const auto favourite = std::find(queues.begin(), queues.end(), favourite_);
  if (favourite == queues.end() || random.below(8) == 0)
    favourite_ = queues[random.below(static_cast<uint32_t>(queues.size()))];
  return *favourite_;
}

// Other host threads may submit what the stream waits for, or end its wait. Returns false where
// that takes too long.
template <typename Done>
bool Streams::wait_for_hosts(Queue& target, Done done) {
  const auto end = Clock::now() + std::chrono::duration<double>(wait_limit_);
  while (Clock::now() < end && !done()) {
    changed_.wait_for(mutex_, std::chrono::milliseconds(1));
    ++progress_;  // a host may also have written memory
    if (advance(target)) return true;
  }
  return done();
}

// Work that waits for another stream ends with an error of its own; a wait for an event cannot.
void Streams::let_time_run_out(Queue& target) {
  ++progress_;
  Queue* const queue = ready(target);
  const std::string name = "a stream of emulated GPU " + std::to_string(target.device());
  if (!queue)
    throw_error(ErrorCode::internal, name,
                " waits for an event that nothing brings about: the streams wait for each other");
  const TimeRunsOut now;
  try {
    queue->run_front();
    note_progress();
  } catch (const NotReady&) {
    throw_error(ErrorCode::internal, name, " waits for ever");
  }
}

}  // namespace turbomind::emulator
