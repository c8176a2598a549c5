#include "tiers/fetch/fetch_cost.h"

#include <algorithm>

#include "tiers/page_mover.h"

namespace turbomind {

namespace {
// Computing takes time from other sequences and power, loading takes little of either. So
// pages are loaded until that takes longer by both of these.
constexpr double kUnnoticed = 0.05;  // seconds that a user does not notice
constexpr double kClearlyFaster = 2;
constexpr int64_t kAtATime = PageMover::kLoaders;
constexpr double kFirstSpeed = 500;  // tokens/s, before any step was measured
}  // namespace

double ComputeCost::seconds(int64_t from, int64_t to) const {
  return compute_seconds(time, std::max<int64_t>(0, to - from), from, chunk, kFirstSpeed);
}

double FetchCost::load_seconds(const std::vector<TierLoad>& loads) const {
  double seconds = 0;
  for (size_t i = 0; i < loads.size(); ++i)
    if (loads[i].pages > 0)
      seconds += loads[i].pages * times_[i].predict(loads[i].bytes / loads[i].pages) /
                 std::min<int64_t>(loads[i].pages, kAtATime);
  return seconds;
}

bool FetchCost::worth(const std::vector<TierLoad>& loads, double compute_seconds) const {
  const double seconds = load_seconds(loads);
  return seconds <= compute_seconds + kUnnoticed || seconds <= compute_seconds * kClearlyFaster;
}

double FetchCost::bytes_per_second(size_t tier, int64_t page_bytes) const {
  const double seconds = times_[tier].predict(page_bytes);
  return seconds > 0 ? kAtATime * page_bytes / seconds : 0;
}

}  // namespace turbomind
