#include "tiers/page_mover.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>

#include "core/process.h"

namespace turbomind {

namespace {

constexpr std::chrono::milliseconds kIdle(200);  // between rounds of maintenance
constexpr int kRounds = 16;                      // of maintenance after the last write

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<LowerTier*> pointers(const TierPtrs& tiers) {
  std::vector<LowerTier*> out;
  for (const auto& tier : tiers) out.push_back(tier.get());
  return out;
}

size_t largest_page(const Model& model) {
  size_t bytes = 0;
  for (size_t g = 0; g < model.groups().size(); ++g)
    bytes = std::max(bytes, model.pages().stored_page_bytes(static_cast<int>(g), kPageTokens));
  return bytes;
}

}  // namespace

// State of the threads, which outlives the PageMover when they are detached. They use the model and
// `wake`, which belong to the engine, only inside touch() and wake().
class PageMoverThreads {
 public:
  using Moves = PageMover::Moves;

  PageMoverThreads(Model& model, SharedTiers tiers, std::function<void()> wake)
      : model_(model),
        owned_(std::move(tiers)),
        tiers_(pointers(*owned_)),
        batch_(static_cast<size_t>(std::max(model.pages().page_batch(), 1))),
        largest_(largest_page(model)),
        memory_(model.pages().host_memory()),
        wake_(std::move(wake)) {}

  void begin() {
    std::lock_guard lock(mutex_);
    ++running_;
  }
  void end() noexcept;
  void loop(bool loads_only) noexcept;

  void post(Moves& moves) noexcept;
  Moves take_done() noexcept;
  void revoke(PageMove& move) noexcept;
  bool wait_done(double seconds);
  void ask_to_stop() noexcept;
  bool wait_ended(double seconds) noexcept;
  void detach() noexcept;

 private:
  // A page that a thread is moving. Its payload is in a buffer, or in the memory of a tier.
  struct Slot {
    PageMove* move = nullptr;
    HostBlock buffer;
    size_t buffer_bytes = 0;
    std::unique_ptr<BorrowedPage> borrowed;
    StoredPage loaded;       // description of the payload
    size_t loaded_from = 0;  // tier; those above it do not have the page yet
  };
  using Slots = std::vector<Slot*>;
  // State of one thread.
  struct Worker {
    bool loads_only = false;
    std::vector<Slot> slots;
    uint64_t removals = 0;  // tasks done before its loads began
  };

  bool next(const Worker& worker, Moves& current);
  void maintain(std::unique_lock<std::mutex>& lock);
  Slots take_slots(Worker& worker, const Moves& moves) const;
  void run(Worker& worker, const Moves& moves, Slots& slots);
  void task(PageMove& move);
  void load(Worker& worker, const Slots& slots);
  void load_from(size_t tier, const Slots& slots);
  bool fetch(size_t tier, Slot& slot);
  bool revoked(const PageMove& move);
  std::optional<PageRef> find(const LowerTier& tier, const StoredPage& want) const;
  bool wanted(const StoredPage& stored, const PageMove& move) const;
  void promote(const Worker& worker, const Slot& slot) noexcept;
  void save(const Slots& slots);
  void store(Slot& slot);
  uint8_t* buffer(Slot& slot, size_t bytes) const;
  const uint8_t* whole_payload(Slot& slot) const;
  static PageTransfer transfer_of(const Slot& slot, int stored, size_t bytes);
  void wake();
  template <typename F>
  void touch(Slots& slots, F&& copy);

  Model& model_;
  SharedTiers owned_;
  const std::vector<LowerTier*> tiers_;
  const size_t batch_;       // most pages that a thread moves at a time
  const size_t largest_;     // bytes of payload
  const HostMemory memory_;  // of buffers
  const std::function<void()> wake_;

  std::mutex mutex_;
  std::condition_variable work_, done_changed_, unused_, ended_changed_;
  Moves loads_, others_, done_;
  bool stop_ = false;
  bool detached_ = false;
  bool ended_ = false;
  int running_ = 0;      // threads
  int uses_ = 0;         // of model and `wake`, now
  int rounds_left_ = 0;  // rounds of maintenance until the next write
  bool unsynced_ = false;
  std::shared_mutex promoting_;        // shared by threads that promote
  std::atomic<uint64_t> removals_{0};  // tasks that are done
};

PageMover::PageMover(Model& model, SharedTiers tiers, std::function<void()> wake)
    : tiers_(pointers(*tiers)),
      shared_(std::make_shared<PageMoverThreads>(model, std::move(tiers), std::move(wake))) {
  const auto start = [this](bool loads_only) {
    shared_->begin();
    try {
      return start_thread([shared = shared_, loads_only] { shared->loop(loads_only); });
    } catch (...) {
      shared_->end();
      throw;
    }
  };
  first_ = start(false);
  try {
    second_ = start(true);
  } catch (...) {
    stop(kPatience);
    throw;
  }
}

void PageMover::post(Moves&& moves) noexcept {
  if (!moves.empty()) shared_->post(moves);
}

PageMover::Moves PageMover::take_done() noexcept {
  return shared_->take_done();
}

void PageMover::revoke(PageMove& move) noexcept {
  shared_->revoke(move);
}

bool PageMover::wait_done(double seconds) {
  return shared_->wait_done(seconds);
}

bool PageMover::stop(double seconds) noexcept {
  if (!first_.joinable()) return !detached_;
  shared_->ask_to_stop();
  detached_ = !shared_->wait_ended(seconds);
  if (detached_) shared_->detach();
  for (std::thread* thread : {&first_, &second_}) {
    if (!thread->joinable()) continue;
    if (detached_)
      thread->detach();
    else
      thread->join();
  }
  return !detached_;
}

// PageMoverThreads

void PageMoverThreads::post(Moves& moves) noexcept {
  {
    std::lock_guard lock(mutex_);
    Moves& queue = moves.front()->kind == PageMove::Kind::load ? loads_ : others_;
    queue.splice(queue.end(), moves);
  }
  work_.notify_all();
}

PageMover::Moves PageMoverThreads::take_done() noexcept {
  std::lock_guard lock(mutex_);
  Moves done;
  done.splice(done.end(), done_);
  return done;
}

void PageMoverThreads::revoke(PageMove& move) noexcept {
  std::unique_lock lock(mutex_);
  move.revoked = true;
  unused_.wait(lock, [&] { return !move.touching; });
}

bool PageMoverThreads::wait_done(double seconds) {
  std::unique_lock lock(mutex_);
  return done_changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                                [this] { return !done_.empty(); });
}

void PageMoverThreads::ask_to_stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
}

bool PageMoverThreads::wait_ended(double seconds) noexcept {
  std::unique_lock lock(mutex_);
  return ended_changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                                 [this] { return ended_; });
}

// Makes the threads stop using model and `wake`. Waits at most while a page is copied.
void PageMoverThreads::detach() noexcept {
  std::unique_lock lock(mutex_);
  detached_ = true;
  unused_.wait(lock, [this] { return uses_ == 0; });
}

// The last thread also destroys the tiers, which may write: only this thread waits for a disk.
void PageMoverThreads::end() noexcept {
  std::unique_lock lock(mutex_);
  if (--running_ > 0) return;
  lock.unlock();
  owned_.reset();
  lock.lock();
  ended_ = true;
  ended_changed_.notify_all();
}

void PageMoverThreads::loop(bool loads_only) noexcept {
  {
    Worker worker;
    worker.loads_only = loads_only;
    Moves current;
    while (next(worker, current)) {
      Slots slots;
      try {
        run(worker, current, slots);
      } catch (...) {  // moves without `succeeded` have failed
      }
      bool wrote = current.front()->kind != PageMove::Kind::load;
      for (const Slot* slot : slots) wrote = wrote || slot->loaded_from > 0;
      {
        std::lock_guard lock(mutex_);
        done_.splice(done_.end(), current);  // the moves belong to the engine from here on
        unsynced_ = unsynced_ || wrote;
        if (wrote) rounds_left_ = kRounds;
      }
      done_changed_.notify_one();
      wake();
      for (Slot* slot : slots) {
        promote(worker, *slot);
        slot->borrowed.reset();
      }
    }
  }
  end();
}

// Waits for moves and takes some of one kind. Returns false when the thread is to end.
bool PageMoverThreads::next(const Worker& worker, Moves& current) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] {
    return stop_ || !loads_.empty() || (!worker.loads_only && !others_.empty());
  };
  while (!ready())
    if (rounds_left_ == 0 || worker.loads_only) {
      work_.wait(lock, ready);
    } else if (!work_.wait_for(lock, kIdle, ready)) {
      maintain(lock);
    }
  if (stop_) return false;
  Moves& queue = loads_.empty() ? others_ : loads_;
  const PageMove::Kind kind = queue.front()->kind;
  size_t most = kind == PageMove::Kind::task ? 1 : batch_;
  if (kind == PageMove::Kind::load)
    most = std::min(most, (queue.size() + 1) / 2);  // shared by two threads
  do current.splice(current.end(), queue, queue.begin());
  while (current.size() < most && !queue.empty() && queue.front()->kind == kind);
  return true;
}

void PageMoverThreads::maintain(std::unique_lock<std::mutex>& lock) {
  const bool sync = std::exchange(unsynced_, false);
  --rounds_left_;
  lock.unlock();
  for (LowerTier* tier : tiers_) try {
      if (sync) tier->sync();
      tier->maintain();
    } catch (...) {  // out of memory; the next round is soon
    }
  lock.lock();
}

void PageMoverThreads::wake() {
  {
    std::lock_guard lock(mutex_);
    if (detached_) return;
    ++uses_;
  }
  wake_();
  {
    std::lock_guard lock(mutex_);
    --uses_;
  }
  unused_.notify_all();
}

// Runs `copy`, which uses the model, after removing from `slots` the moves that were revoked.
template <typename F>
void PageMoverThreads::touch(Slots& slots, F&& copy) {
  struct Touching {
    PageMoverThreads& shared;
    const Slots& slots;
    ~Touching() {
      {
        std::lock_guard lock(shared.mutex_);
        for (const Slot* slot : slots) slot->move->touching = false;
        --shared.uses_;
      }
      shared.unused_.notify_all();
    }
  };
  {
    std::lock_guard lock(mutex_);
    std::erase_if(slots, [this](const Slot* s) { return detached_ || s->move->revoked; });
    if (slots.empty()) return;
    for (const Slot* slot : slots) slot->move->touching = true;
    ++uses_;
  }
  Touching touching{*this, slots};
  copy();
}

PageMoverThreads::Slots PageMoverThreads::take_slots(Worker& worker, const Moves& moves) const {
  if (worker.slots.size() < moves.size()) worker.slots.resize(moves.size());
  Slots slots;
  for (const auto& move : moves) {
    Slot& slot = worker.slots[slots.size()];
    slot.move = move.get();
    slot.borrowed.reset();
    slot.loaded_from = 0;
    slots.push_back(&slot);
  }
  return slots;
}

void PageMoverThreads::run(Worker& worker, const Moves& moves, Slots& slots) {
  const PageMove::Kind kind = moves.front()->kind;
  if (kind == PageMove::Kind::task) return task(*moves.front());
  slots = take_slots(worker, moves);
  if (kind == PageMove::Kind::load)
    load(worker, slots);
  else
    save(slots);
}

uint8_t* PageMoverThreads::buffer(Slot& slot, size_t bytes) const {
  if (slot.buffer_bytes < bytes) {
    slot.buffer.reset();
    slot.buffer_bytes = 0;
    bytes = std::max(bytes, largest_);
    slot.buffer = memory_.allocate(bytes);
    slot.buffer_bytes = bytes;
  }
  return slot.buffer.get();
}

PageTransfer PageMoverThreads::transfer_of(const Slot& slot, int stored, size_t bytes) {
  PageTransfer t;
  t.group = slot.move->record.group;
  t.page = slot.move->page;
  t.count = static_cast<int>(slot.move->record.tokens.size());
  t.stored = stored;
  if (slot.borrowed)
    t.parts = slot.borrowed->parts;
  else
    t.parts = {{slot.buffer.get(), bytes}};
  return t;
}

void PageMoverThreads::task(PageMove& move) {
  std::unique_lock lock(promoting_, std::defer_lock);
  if (move.removes) lock.lock();
  if (move.task)
    for (LowerTier* tier : tiers_) move.task(*tier);
  if (move.removes) ++removals_;  // pages read before may be among the removed ones
  move.succeeded = true;
}

void PageMoverThreads::load(Worker& worker, const Slots& slots) {
  worker.removals = removals_;
  const double start = now();
  for (size_t i = 0; i < tiers_.size(); ++i) load_from(i, slots);
  const double seconds = (now() - start) / static_cast<double>(slots.size());
  for (const Slot* slot : slots) slot->move->seconds = seconds;
}

bool PageMoverThreads::revoked(const PageMove& move) {
  std::lock_guard lock(mutex_);
  return move.revoked;
}

void PageMoverThreads::load_from(size_t tier, const Slots& slots) {
  Slots found;
  found.reserve(slots.size());
  for (Slot* slot : slots) try {
      const PageMove& move = *slot->move;
      if (!move.succeeded && !revoked(move) && fetch(tier, *slot)) found.push_back(slot);
    } catch (const std::exception&) {  // out of memory: the move fails
    }
  touch(found, [&] {
    std::vector<PageTransfer> transfers;
    Slots written;
    for (Slot* slot : found) {
      const StoredPage& loaded = slot->loaded;
      if (!wanted(loaded, *slot->move)) continue;
      const int stored = static_cast<int>(loaded.tokens.size());
      transfers.push_back(transfer_of(*slot, stored, loaded.payload_bytes));
      written.push_back(slot);
    }
    if (!transfers.empty()) model_.pages().write_pages(transfers);
    for (Slot* slot : written) {
      PageMove& move = *slot->move;
      move.succeeded = true;
      move.foreign = slot->loaded.numerics != model_.numerics_fingerprint();
      move.tier = slot->loaded_from = tier;
      move.bytes = slot->loaded.payload_bytes;
    }
  });
}

// Reads the page that the slot's move needs from the tier. Returns false when it is not there.
bool PageMoverThreads::fetch(size_t tier, Slot& slot) {
  LowerTier& from = *tiers_[tier];
  const auto ref = find(from, slot.move->record);
  if (!ref || (slot.move->exact && ref->foreign)) return false;
  slot.borrowed.reset();
  if (batch_ > 1 && tier == 0) slot.borrowed = from.borrow(*ref);
  if (slot.borrowed) {
    slot.loaded = slot.borrowed->page;
    return true;
  }
  return from.read(*ref, &slot.loaded, buffer(slot, ref->payload_bytes));
}

// A prefix may be in another page now than when the fetch was planned.
std::optional<PageRef> PageMoverThreads::find(const LowerTier& tier, const StoredPage& want) const {
  const int count = static_cast<int>(want.tokens.size());
  if (count == kPageTokens) return tier.find(want.key, want.group);
  int shared = 0;
  const auto ref = tier.find_prefix(want.parent, want.group, want.tokens.data(), count, &shared);
  return shared == count ? ref : std::nullopt;
}

// Returns whether the stored page is the one that the move needs, checking every field.
bool PageMoverThreads::wanted(const StoredPage& stored, const PageMove& move) const {
  const StoredPage& want = move.record;
  const size_t count = stored.tokens.size();
  const bool full = want.tokens.size() == kPageTokens;
  return (!full || stored.key == want.key) && stored.parent == want.parent &&
         stored.group == want.group && stored.fingerprint == want.fingerprint &&
         stored.first_head == want.first_head && stored.heads == want.heads &&
         want.tokens.size() <= count && count <= kPageTokens &&
         std::equal(want.tokens.begin(), want.tokens.end(), stored.tokens.begin()) &&
         stored.payload_bytes ==
             model_.pages().stored_page_bytes(stored.group, static_cast<int>(count)) &&
         !(move.exact && stored.numerics != model_.numerics_fingerprint());
}

// Copies a loaded page to the tiers above the one it came from, unless it may have been removed
// since.
void PageMoverThreads::promote(const Worker& worker, const Slot& slot) noexcept {
  if (slot.loaded_from == 0) return;
  std::shared_lock lock(promoting_);
  if (removals_ != worker.removals) return;
  for (size_t i = 0; i < slot.loaded_from; ++i) try {
      tiers_[i]->write(slot.loaded, slot.buffer.get());
    } catch (...) {  // then it is not promoted
    }
}

void PageMoverThreads::save(const Slots& slots) {
  Slots read;
  read.reserve(slots.size());
  for (Slot* slot : slots) try {
      const StoredPage& record = slot->move->record;
      if (batch_ > 1) slot->borrowed = tiers_.front()->reserve(record);
      if (!slot->borrowed) buffer(*slot, record.payload_bytes);
      read.push_back(slot);
    } catch (const std::exception&) {  // out of memory: the move fails
    }
  touch(read, [&] {
    std::vector<PageTransfer> transfers;
    for (const Slot* slot : read) {
      const StoredPage& record = slot->move->record;
      const int count = static_cast<int>(record.tokens.size());
      transfers.push_back(transfer_of(*slot, count, record.payload_bytes));
    }
    model_.pages().read_pages(transfers);
  });
  for (Slot* slot : read) try {
      store(*slot);
    } catch (const std::exception&) {  // out of memory: the move fails
    }
}

void PageMoverThreads::store(Slot& slot) {
  PageMove& move = *slot.move;
  for (LowerTier* tier : tiers_) {
    if (move.host_only && tier != tiers_.front()) break;
    move.succeeded = false;  // for the case that the tier throws
    if (slot.borrowed && tier == tiers_.front())
      move.succeeded = tier->insert(*slot.borrowed);
    else
      move.succeeded = tier->write(move.record, whole_payload(slot));
  }
}

// Returns the payload in one piece.
const uint8_t* PageMoverThreads::whole_payload(Slot& slot) const {
  if (!slot.borrowed) return slot.buffer.get();
  const std::vector<PayloadPart>& parts = slot.borrowed->parts;
  if (parts.size() == 1) return parts.front().data;
  uint8_t* const whole = buffer(slot, slot.move->record.payload_bytes);
  uint8_t* to = whole;
  for (const PayloadPart& part : parts) to = std::copy_n(part.data, part.bytes, to);
  return whole;
}

}  // namespace turbomind
