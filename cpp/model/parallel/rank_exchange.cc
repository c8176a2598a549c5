#include "model/parallel/rank_exchange.h"

#include <chrono>
#include <thread>

namespace turbomind {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::nanoseconds kBusySpin = std::chrono::microseconds(20);

}  // namespace

std::function<void(int rank)> RankExchange::test_hook;

RankExchange::RankExchange(int ranks) : ranks_(ranks) {
  for (Round& round : rounds_) round.partials.resize(ranks);
}

void RankExchange::begin_step() {
  for (RankState& rank : ranks_) {
    rank.posted.store(0);
    rank.cancelled = false;
  }
  failed_.store(false);
}

const std::vector<Mat>& RankExchange::add(int rank, const Mat& partial, bool cancel,
                                          const ThreadPool& pool) {
  if (before_post_) before_post_(rank);
  RankState& own = ranks_[rank];
  const uint64_t number = own.posted.load(std::memory_order_relaxed);
  Round& round = rounds_[number % 2];
  round.partials[rank] = partial;
  if (rank == 0) round.cancel = cancel;
  own.posted.store(number + 1);
  wake();
  wait(pool, [&] { return failed_.load() || all_posted(number + 1); });
  if (failed_.load()) throw RankReleased();
  own.cancelled |= round.cancel;
  return round.partials;
}

void RankExchange::fail() noexcept {
  failed_.store(true);
  wake();
}

bool RankExchange::all_posted(uint64_t count) const {
  for (const RankState& rank : ranks_)
    if (rank.posted.load() < count) return false;
  return true;
}

// A sleeper counts itself before its last check of the condition, and a waker changes the condition
// before it reads the count, both sequentially consistent. So either the sleeper sees the change or
// the waker sees the sleeper.
template <typename Done>
void RankExchange::wait(const ThreadPool& pool, Done done) {
  const auto start = Clock::now();
  for (auto waited = start - start; pool.spin_rule().spins(waited); waited = Clock::now() - start) {
    for (int i = 0; i < 16; ++i) {
      if (done()) return;
      cpu_pause();
    }
    if (waited >= kBusySpin) std::this_thread::yield();  // another process may want this CPU
  }
  if (done()) return;
  std::unique_lock lock(mutex_);
  sleepers_.fetch_add(1);
  changed_.wait(lock, done);
  sleepers_.fetch_sub(1);
}

void RankExchange::wake() {
  if (sleepers_.load() == 0) return;
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

}  // namespace turbomind
