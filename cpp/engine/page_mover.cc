#include "engine/page_mover.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>

namespace turbomind {

namespace {

constexpr std::chrono::milliseconds kIdle(200);  // between rounds of tidying up
constexpr int kChores = 16;                      // rounds after the last write

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<LowerTier*> pointers(const TierPtrs& tiers) {
  std::vector<LowerTier*> out;
  for (const auto& tier : tiers) out.push_back(tier.get());
  return out;
}

}  // namespace

// What the threads use, and keep alive when they are left behind. What is the engine's, the model
// and `wake`, they use inside of touch() and wake() alone.
class PageMoverThreads {
 public:
  using Moves = PageMover::Moves;

  PageMoverThreads(Model& model, SharedTiers tiers, std::function<void()> wake)
      : model_(model),
        owned_(std::move(tiers)),
        tiers_(pointers(*owned_)),
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
  void leave_behind() noexcept;

 private:
  // One thread's.
  struct Worker {
    bool loads_only = false;
    std::vector<uint8_t> buffer;
    StoredPage loaded;       // what the buffer has
    size_t loaded_from = 0;  // tiers above this one do not have it yet
    uint64_t removals = 0;   // done before its load began
  };

  bool next(const Worker& worker, Moves& current);
  void idle_chores(std::unique_lock<std::mutex>& lock);
  void run(Worker& worker, PageMove& move);
  void chore(PageMove& move);
  void load(Worker& worker, PageMove& move);
  bool load_from(size_t tier, Worker& worker, PageMove& move);
  std::optional<PageRef> find(const LowerTier& tier, const StoredPage& want) const;
  bool wanted(const StoredPage& stored, const PageMove& move) const;
  void promote(const Worker& worker) noexcept;
  void save(Worker& worker, PageMove& move);
  void wake();
  template <typename F>
  bool touch(PageMove& move, F&& copy);

  Model& model_;
  SharedTiers owned_;
  const std::vector<LowerTier*> tiers_;
  const std::function<void()> wake_;

  std::mutex mutex_;
  std::condition_variable work_, done_news_, unused_, ended_news_;
  Moves loads_, others_, done_;
  bool stop_ = false;
  bool left_behind_ = false;
  bool ended_ = false;
  int running_ = 0;      // threads
  int uses_ = 0;         // of what is the engine's, just now
  int chores_left_ = 0;  // rounds of tidying up since something was written
  bool unsynced_ = false;
  std::shared_mutex promoting_;        // shared by those who do
  std::atomic<uint64_t> removals_{0};  // that are done
};

PageMover::PageMover(Model& model, SharedTiers tiers, std::function<void()> wake)
    : tiers_(pointers(*tiers)),
      shared_(std::make_shared<PageMoverThreads>(model, std::move(tiers), std::move(wake))) {
  const auto start = [this](bool loads_only) {
    shared_->begin();
    try {
      return std::thread([shared = shared_, loads_only] { shared->loop(loads_only); });
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
  if (!first_.joinable()) return !left_behind_;
  shared_->ask_to_stop();
  left_behind_ = !shared_->wait_ended(seconds);
  if (left_behind_) shared_->leave_behind();
  for (std::thread* thread : {&first_, &second_}) {
    if (!thread->joinable()) continue;
    if (left_behind_)
      thread->detach();
    else
      thread->join();
  }
  return !left_behind_;
}

// From here on: what the threads do, and what is asked of them.

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
  return done_news_.wait_for(lock, std::chrono::duration<double>(seconds),
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
  return ended_news_.wait_for(lock, std::chrono::duration<double>(seconds),
                              [this] { return ended_; });
}

// Waits at most while a page is copied.
void PageMoverThreads::leave_behind() noexcept {
  std::unique_lock lock(mutex_);
  left_behind_ = true;
  unused_.wait(lock, [this] { return uses_ == 0; });
}

// The last thread ends the tiers too, which may write: nobody but it waits for a disk.
void PageMoverThreads::end() noexcept {
  std::unique_lock lock(mutex_);
  if (--running_ > 0) return;
  lock.unlock();
  owned_.reset();
  lock.lock();
  ended_ = true;
  ended_news_.notify_all();
}

void PageMoverThreads::loop(bool loads_only) noexcept {
  {
    Worker worker;
    worker.loads_only = loads_only;
    Moves current;
    while (next(worker, current)) {
      PageMove& move = *current.front();
      worker.loaded_from = 0;
      try {
        run(worker, move);
      } catch (...) {  // it has not succeeded
      }
      const bool wrote = move.kind != PageMove::Kind::load || worker.loaded_from > 0;
      {
        std::lock_guard lock(mutex_);
        done_.splice(done_.end(), current);
        unsynced_ = unsynced_ || wrote;
        if (wrote) chores_left_ = kChores;
      }
      done_news_.notify_one();
      wake();
      promote(worker);
    }
  }
  end();
}

// False when it is time to end.
bool PageMoverThreads::next(const Worker& worker, Moves& current) {
  std::unique_lock lock(mutex_);
  const auto news = [&] {
    return stop_ || !loads_.empty() || (!worker.loads_only && !others_.empty());
  };
  while (!news())
    if (chores_left_ == 0 || worker.loads_only) {
      work_.wait(lock, news);
    } else if (!work_.wait_for(lock, kIdle, news)) {
      idle_chores(lock);
    }
  if (stop_) return false;
  Moves& queue = loads_.empty() ? others_ : loads_;
  current.splice(current.end(), queue, queue.begin());
  return true;
}

void PageMoverThreads::idle_chores(std::unique_lock<std::mutex>& lock) {
  const bool sync = std::exchange(unsynced_, false);
  --chores_left_;
  lock.unlock();
  for (LowerTier* tier : tiers_) try {
      if (sync) tier->sync();
      tier->maintain();
    } catch (...) {  // for lack of memory; the next round is soon
    }
  lock.lock();
}

void PageMoverThreads::wake() {
  {
    std::lock_guard lock(mutex_);
    if (left_behind_) return;
    ++uses_;
  }
  wake_();
  {
    std::lock_guard lock(mutex_);
    --uses_;
  }
  unused_.notify_all();
}

// Runs `copy`, which uses the model, unless the engine has taken the device's page back.
template <typename F>
bool PageMoverThreads::touch(PageMove& move, F&& copy) {
  struct Touching {
    PageMoverThreads& shared;
    PageMove& move;
    ~Touching() {
      {
        std::lock_guard lock(shared.mutex_);
        move.touching = false;
        --shared.uses_;
      }
      shared.unused_.notify_all();
    }
  };
  {
    std::lock_guard lock(mutex_);
    if (left_behind_ || move.revoked) return false;
    move.touching = true;
    ++uses_;
  }
  Touching touching{*this, move};
  copy();
  return true;
}

void PageMoverThreads::run(Worker& worker, PageMove& move) {
  switch (move.kind) {
    case PageMove::Kind::load:
      return load(worker, move);
    case PageMove::Kind::save:
      return save(worker, move);
    case PageMove::Kind::chore:
      return chore(move);
  }
}

void PageMoverThreads::chore(PageMove& move) {
  std::unique_lock lock(promoting_, std::defer_lock);
  if (move.removes) lock.lock();
  if (move.chore)
    for (LowerTier* tier : tiers_) move.chore(*tier);
  if (move.removes) ++removals_;  // what was read up to now may be of what is removed now
  move.succeeded = true;
}

void PageMoverThreads::load(Worker& worker, PageMove& move) {
  {
    std::lock_guard lock(mutex_);
    if (move.revoked) return;  // nothing is read for nobody
  }
  worker.removals = removals_;
  const double start = now();
  for (size_t i = 0; i < tiers_.size() && !move.succeeded; ++i)
    if (!load_from(i, worker, move)) break;
  move.seconds = now() - start;
}

// False when the engine does not want it any more.
bool PageMoverThreads::load_from(size_t tier, Worker& worker, PageMove& move) {
  const auto ref = find(*tiers_[tier], move.record);
  if (!ref || (move.exact && ref->foreign)) return true;
  worker.buffer.resize(std::max(worker.buffer.size(), ref->payload_bytes));
  StoredPage& loaded = worker.loaded;
  if (!tiers_[tier]->read(*ref, &loaded, worker.buffer.data())) return true;
  return touch(move, [&] {
    if (!wanted(loaded, move)) return;
    const int stored = static_cast<int>(loaded.tokens.size());
    const int count = static_cast<int>(move.record.tokens.size());
    model_.write_page(move.record.group, move.page, count, worker.buffer.data(), stored);
    move.succeeded = true;
    move.foreign = loaded.numerics != model_.numerics_id();
    move.tier = worker.loaded_from = tier;
    move.bytes = loaded.payload_bytes;
  });
}

// A beginning may have come to stand in another page than the one that was found before.
std::optional<PageRef> PageMoverThreads::find(const LowerTier& tier, const StoredPage& want) const {
  const int count = static_cast<int>(want.tokens.size());
  if (count == kPageTokens) return tier.find(want.key, want.group);
  int shared = 0;
  const auto ref = tier.find_beginning(want.parent, want.group, want.tokens.data(), count, &shared);
  return shared == count ? ref : std::nullopt;
}

// Trusts nothing that it can check.
bool PageMoverThreads::wanted(const StoredPage& stored, const PageMove& move) const {
  const StoredPage& want = move.record;
  const size_t count = stored.tokens.size();
  const bool full = want.tokens.size() == kPageTokens;
  return (!full || stored.key == want.key) && stored.parent == want.parent &&
         stored.group == want.group && stored.fingerprint == want.fingerprint &&
         stored.first_head == want.first_head && stored.heads == want.heads &&
         want.tokens.size() <= count && count <= kPageTokens &&
         std::equal(want.tokens.begin(), want.tokens.end(), stored.tokens.begin()) &&
         stored.payload_bytes == model_.stored_page_bytes(stored.group, static_cast<int>(count)) &&
         !(move.exact && stored.numerics != model_.numerics_id());
}

// What came from far below is nearer the next time; not what may have been removed since.
void PageMoverThreads::promote(const Worker& worker) noexcept {
  if (worker.loaded_from == 0) return;
  std::shared_lock lock(promoting_);
  if (removals_ != worker.removals) return;
  for (size_t i = 0; i < worker.loaded_from; ++i) try {
      tiers_[i]->write(worker.loaded, worker.buffer.data());
    } catch (...) {  // then it is not
    }
}

void PageMoverThreads::save(Worker& worker, PageMove& move) {
  const StoredPage& record = move.record;
  worker.buffer.resize(std::max(worker.buffer.size(), record.payload_bytes));
  const bool read = touch(move, [&] {
    model_.read_page(record.group, move.page, static_cast<int>(record.tokens.size()),
                     worker.buffer.data());
  });
  if (!read) return;
  for (LowerTier* tier : tiers_) {
    move.succeeded = false;  // stays so if this one throws
    move.succeeded = tier->write(record, worker.buffer.data());
  }
}

}  // namespace turbomind
