// What the ranks of a group exchange in a step: partial sums, and whether the step goes on.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "core/tensor.h"
#include "core/thread_pool.h"

namespace turbomind {

// Thrown to a rank that waits for another one which has failed.
class RankReleased : public std::exception {
 public:
  const char* what() const noexcept override { return "another rank has failed"; }
};

// Every rank makes the same exchanges in the same order, each from a thread of its own.
class RankExchange {
 public:
  explicit RankExchange(int ranks);

  int ranks() const { return static_cast<int>(ranks_.size()); }
  // Starts a step, while no rank is in one.
  void begin_step();

  // Posts the partial sum of a rank and waits for those of all, which it returns in rank order. A
  // rank leaves the memory of its partial sum as it is until its next exchange has returned, or all
  // ranks have ended the step.
  // `cancel` counts for rank 0 alone: all ranks see it with this exchange. Throws RankReleased when
  // a rank has failed. `pool` says how long a wait may spin.
  const std::vector<Mat>& add(int rank, const Mat& partial, bool cancel, const ThreadPool& pool);
  // Whether rank 0 has cancelled the step in an exchange that `rank` has made.
  bool cancelled(int rank) const { return ranks_[rank].cancelled; }

  // Releases all ranks that wait now or later in this step.
  void fail() noexcept;

  // For tests: exchanges that are made while it is set call it before each post; it may throw.
  static std::function<void(int rank)> test_hook;

 private:
  struct alignas(64) RankState {
    std::atomic<uint64_t> posted{0};  // exchanges of this step
    bool cancelled = false;           // of the rank's own thread
  };
  // Two take turns: who has returned from exchange n + 1 knows that no rank reads n any more.
  struct Round {
    std::vector<Mat> partials;
    bool cancel = false;
  };

  bool all_posted(uint64_t count) const;
  template <typename Done>
  void wait(const ThreadPool& pool, Done done);
  void wake();

  const std::function<void(int rank)> before_post_ = test_hook;
  std::vector<RankState> ranks_;
  Round rounds_[2];
  std::atomic<bool> failed_{false};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace turbomind
