#include "engine/page_mover.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace turbomind {

namespace {

constexpr std::chrono::milliseconds kIdle(200);  // between rounds of tidying up
constexpr int kChores = 16;                      // rounds after the last write

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

PageMover::PageMover(Model& model, std::vector<LowerTier*> tiers, std::function<void()> wake)
    : model_(model), tiers_(std::move(tiers)), wake_(std::move(wake)) {
  first_ = std::thread([this] { loop(false); });
  try {
    second_ = std::thread([this] { loop(true); });
  } catch (...) {
    stop();
    throw;
  }
}

void PageMover::post(Moves&& moves) noexcept {
  if (moves.empty()) return;
  {
    std::lock_guard lock(mutex_);
    Moves& queue = moves.front()->kind == PageMove::Kind::load ? loads_ : others_;
    queue.splice(queue.end(), moves);
  }
  work_.notify_all();
}

PageMover::Moves PageMover::take_done() noexcept {
  std::lock_guard lock(mutex_);
  Moves done;
  done.splice(done.end(), done_);
  return done;
}

bool PageMover::revoke(PageMove& move) noexcept {
  std::unique_lock lock(mutex_);
  move.revoked = true;
  touched_.wait(lock, [&] { return !move.touching; });
  return !move.touched;
}

bool PageMover::wait_done(double seconds) {
  std::unique_lock lock(mutex_);
  return done_news_.wait_for(lock, std::chrono::duration<double>(seconds),
                             [this] { return !done_.empty(); });
}

void PageMover::stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  for (std::thread* thread : {&first_, &second_})
    if (thread->joinable()) thread->join();
}

void PageMover::loop(bool loads_only) noexcept {
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
    wake_();
    promote(worker);
  }
}

// False when it is time to end.
bool PageMover::next(const Worker& worker, Moves& current) {
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

void PageMover::idle_chores(std::unique_lock<std::mutex>& lock) {
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

void PageMover::run(Worker& worker, PageMove& move) {
  switch (move.kind) {
    case PageMove::Kind::load:
      return load(worker, move);
    case PageMove::Kind::save:
      return save(worker, move);
    case PageMove::Kind::chore:
      if (move.chore)
        for (LowerTier* tier : tiers_) move.chore(*tier);
      move.succeeded = true;
  }
}

// Runs `copy` on the device's page unless the engine has taken that back.
template <typename F>
bool PageMover::touch(PageMove& move, F&& copy) {
  struct Touching {
    PageMover& mover;
    PageMove& move;
    ~Touching() {
      {
        std::lock_guard lock(mover.mutex_);
        move.touching = false;
      }
      mover.touched_.notify_all();
    }
  };
  {
    std::lock_guard lock(mutex_);
    if (move.revoked) return false;
    move.touching = move.touched = true;
  }
  Touching touching{*this, move};
  copy();
  return true;
}

void PageMover::load(Worker& worker, PageMove& move) {
  {
    std::lock_guard lock(mutex_);
    if (move.revoked) return;  // nothing is read for nobody
  }
  const double start = now();
  for (size_t i = 0; i < tiers_.size() && !move.succeeded; ++i)
    if (!load_from(i, worker, move)) break;
  move.seconds = now() - start;
}

// False when the engine does not want it any more.
bool PageMover::load_from(size_t tier, Worker& worker, PageMove& move) {
  const auto ref = find(*tiers_[tier], move.record);
  if (!ref || (move.exact && ref->foreign)) return true;
  worker.buffer.resize(std::max(worker.buffer.size(), ref->payload_bytes));
  StoredPage& loaded = worker.loaded;
  if (!tiers_[tier]->read(*ref, &loaded, worker.buffer.data()) || !wanted(loaded, move))
    return true;
  const int stored = static_cast<int>(loaded.tokens.size());
  const int wanted_tokens = static_cast<int>(move.record.tokens.size());
  const bool done = touch(move, [&] {
    model_.write_page(move.record.group, move.page, wanted_tokens, worker.buffer.data(), stored);
  });
  if (!done) return false;
  move.succeeded = true;
  move.foreign = loaded.numerics != model_.numerics_id();
  move.tier = worker.loaded_from = tier;
  move.bytes = loaded.payload_bytes;
  return true;
}

// A beginning may have come to stand in another page than the one that was found before.
std::optional<PageRef> PageMover::find(const LowerTier& tier, const StoredPage& want) const {
  const int count = static_cast<int>(want.tokens.size());
  if (count == kPageTokens) return tier.find(want.key, want.group);
  int shared = 0;
  const auto ref = tier.find_beginning(want.parent, want.group, want.tokens.data(), count, &shared);
  return shared == count ? ref : std::nullopt;
}

// Trusts nothing that it can check.
bool PageMover::wanted(const StoredPage& stored, const PageMove& move) const {
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

// What came from far below is nearer the next time.
void PageMover::promote(const Worker& worker) noexcept {
  for (size_t i = 0; i < worker.loaded_from; ++i) try {
      tiers_[i]->write(worker.loaded, worker.buffer.data());
    } catch (...) {  // then it is not
    }
}

void PageMover::save(Worker& worker, PageMove& move) {
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
