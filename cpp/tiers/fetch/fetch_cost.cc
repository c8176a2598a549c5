#include "tiers/fetch/fetch_cost.h"

#include <algorithm>

#include "tiers/page_mover.h"

namespace turbomind {

namespace {
// Computing keeps the machine from serving others and from sleeping, loading does not. So loading
// is the choice until it takes longer by a time that somebody notices and by more than this factor.
constexpr double kBarelyNoticed = 0.05;  // seconds
constexpr double kClearlyFaster = 2;
constexpr int64_t kAtATime = PageMover::kLoaders;
constexpr double kFirstSpeed = 500;  // tokens/s, before any step was measured
}  // namespace

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
  return seconds <= compute_seconds + kBarelyNoticed || seconds <= compute_seconds * kClearlyFaster;
}

double FetchCost::bytes_per_second(size_t tier, int64_t page_bytes) const {
  const double seconds = times_[tier].predict(page_bytes);
  return seconds > 0 ? kAtATime * page_bytes / seconds : 0;
}

double compute_range(const StepTime& time, int64_t chunk, int64_t from, int64_t to) {
  return compute_seconds(time, std::max<int64_t>(0, to - from), from, chunk, kFirstSpeed);
}

}  // namespace turbomind
