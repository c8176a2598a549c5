// Cost model of fetching: seconds to load pages of lower tiers, and seconds to compute them
// instead. The running fits behind it are in cost/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cost/step_time.h"
#include "cost/transfer_time.h"

namespace turbomind {

// Pages to load from one tier.
struct TierLoad {
  int64_t pages = 0;
  int64_t bytes = 0;  // of payload, over all of them
  void add(int64_t page_bytes) {
    ++pages;
    bytes += page_bytes;
  }
};

// Time to prefill tokens of a sequence that is alone in the batch.
struct ComputeCost {
  const StepTime& time;
  int64_t chunk;  // most tokens of one step

  // Returns seconds for the tokens [from, to); 0 for an empty range. Before any step was measured
  // it assumes 500 tokens/s.
  double seconds(int64_t from, int64_t to) const;
};

// Time to load pages, per tier. Not synchronised: for the engine thread.
class FetchCost {
 public:
  // `first`: the speed assumed of each tier until pages have been loaded from it.
  explicit FetchCost(const std::vector<ReadSpeed>& first) : times_(first.begin(), first.end()) {}

  // Records that loading one page of `bytes` took `seconds`.
  void observe(size_t tier, int64_t bytes, double seconds) { times_[tier].observe(bytes, seconds); }
  // Returns seconds to load `loads` ([tier]), with as many loads at a time as the mover has
  // threads.
  double load_seconds(const std::vector<TierLoad>& loads) const;
  // Returns whether to load rather than to compute. Loading is preferred, since it leaves the
  // device to other sequences, unless computing is faster by more than 50 ms and by more than 2x.
  bool worth(const std::vector<TierLoad>& loads, double compute_seconds) const;
  const TransferTime& time(size_t tier) const { return times_[tier]; }
  // Returns bytes/s of loading many pages of `page_bytes` bytes each.
  double bytes_per_second(size_t tier, int64_t page_bytes) const;

 private:
  std::vector<TransferTime> times_;
};

}  // namespace turbomind
