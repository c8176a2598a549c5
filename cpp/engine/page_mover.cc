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
    : model_(model), tiers_(std::move(tiers)), wake_(std::move(wake)), thread_([this] { loop(); }) {}

void PageMover::post(Moves&& moves) noexcept {
  if (moves.empty()) return;
  {
    std::lock_guard lock(mutex_);
    Moves& queue = moves.front()->kind == PageMove::Kind::load ? loads_ : others_;
    queue.splice(queue.end(), moves);
  }
  work_.notify_one();
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
  work_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void PageMover::loop() noexcept {
  Moves current;
  while (next(current)) {
    PageMove& move = *current.front();
    loaded_from_ = 0;
    try {
      run(move);
    } catch (const std::exception&) {  // it has not succeeded
    }
    const bool wrote = move.kind != PageMove::Kind::load || loaded_from_ > 0;
    {
      std::lock_guard lock(mutex_);
      done_.splice(done_.end(), current);
      unsynced_ = unsynced_ || wrote;
      if (wrote) chores_left_ = kChores;
    }
    done_news_.notify_one();
    wake_();
    promote();
  }
}

// False when it is time to end.
bool PageMover::next(Moves& current) {
  std::unique_lock lock(mutex_);
  const auto news = [this] { return stop_ || !loads_.empty() || !others_.empty(); };
  while (!news())
    if (chores_left_ == 0) {
      work_.wait(lock, news);
    } else if (!work_.wait_for(lock, kIdle, news)) {
      idle_chores(lock);
    }
  if (stop_) return false;
  Moves& queue = loads_.empty() ? others_ : loads_;
  current.splice(current.end(), queue, queue.begin());
  return true;
}

bool PageMover::idle_chores(std::unique_lock<std::mutex>& lock) {
  const bool sync = std::exchange(unsynced_, false);
  --chores_left_;
  lock.unlock();
  for (LowerTier* tier : tiers_) try {
      if (sync) tier->sync();
      tier->maintain();
    } catch (const std::exception&) {  // for lack of memory; the next round is soon
    }
  lock.lock();
  return sync;
}

void PageMover::run(PageMove& move) {
  switch (move.kind) {
    case PageMove::Kind::load:
      return load(move);
    case PageMove::Kind::save:
      return save(move);
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

void PageMover::load(PageMove& move) {
  const double start = now();
  for (size_t i = 0; i < tiers_.size() && !move.succeeded; ++i)
    if (!load_from(i, move)) break;
  move.seconds = now() - start;
}

// False when the engine does not want it any more.
bool PageMover::load_from(size_t tier, PageMove& move) {
  const auto ref = find(*tiers_[tier], move.record);
  if (!ref || (move.exact && ref->foreign)) return true;
  buffer_.resize(std::max(buffer_.size(), ref->payload_bytes));
  if (!tiers_[tier]->read(*ref, &loaded_, buffer_.data()) || !wanted(loaded_, move)) return true;
  const int stored = static_cast<int>(loaded_.tokens.size());
  const int wanted_tokens = static_cast<int>(move.record.tokens.size());
  const bool done = touch(move, [&] {
    model_.write_page(move.record.group, move.page, wanted_tokens, buffer_.data(), stored);
  });
  if (!done) return false;
  move.succeeded = true;
  move.foreign = loaded_.numerics != model_.numerics_id();
  move.tier = loaded_from_ = tier;
  move.bytes = loaded_.payload_bytes;
  return true;
}

// A beginning may have come to stand in another page than the one that was found before.
std::optional<PageRef> PageMover::find(const LowerTier& tier, const StoredPage& want) const {
  const int count = static_cast<int>(want.tokens.size());
  if (count == kPageTokens) return tier.find(want.key, want.group);
  int shared = 0;
  const auto ref =
      tier.find_beginning(want.parent, want.group, want.tokens.data(), count, &shared);
  return shared == count ? ref : std::nullopt;
}

// Trusts nothing that it can check.
bool PageMover::wanted(const StoredPage& stored, const PageMove& move) const {
  const StoredPage& want = move.record;
  const size_t count = stored.tokens.size();
  const bool full = want.tokens.size() == kPageTokens;
  return (!full || stored.key == want.key) && stored.parent == want.parent && stored.group == want.group &&
         stored.fingerprint == want.fingerprint && stored.first_head == want.first_head &&
         stored.heads == want.heads && want.tokens.size() <= count && count <= kPageTokens &&
         std::equal(want.tokens.begin(), want.tokens.end(), stored.tokens.begin()) &&
         stored.payload_bytes == model_.stored_page_bytes(stored.group, static_cast<int>(count)) &&
         !(move.exact && stored.numerics != model_.numerics_id());
}

// What came from far below is nearer the next time.
void PageMover::promote() noexcept {
  for (size_t i = 0; i < loaded_from_; ++i) try {
      tiers_[i]->write(loaded_, buffer_.data());
    } catch (const std::exception&) {  // then it is not
    }
}

void PageMover::save(PageMove& move) {
  const StoredPage& record = move.record;
  buffer_.resize(std::max(buffer_.size(), record.payload_bytes));
  const bool read = touch(move, [&] {
    model_.read_page(record.group, move.page, static_cast<int>(record.tokens.size()),
                     buffer_.data());
  });
  if (!read) return;
  for (LowerTier* tier : tiers_) move.succeeded = tier->write(record, buffer_.data());
}

}  // namespace turbomind
