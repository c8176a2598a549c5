// What loading pages costs, and what computing them again would.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/step_time.h"
#include "cost/transfer_time.h"

namespace turbomind {

// Of one tier.
struct TierLoad {
  int64_t pages = 0;
  int64_t bytes = 0;
  void add(int64_t page_bytes) {
    ++pages;
    bytes += page_bytes;
  }
};

class FetchCost {
 public:
  // What is believed of each tier until pages have been loaded from it.
  explicit FetchCost(const std::vector<ReadSpeed>& first) : times_(first.begin(), first.end()) {}

  void observe(size_t tier, int64_t bytes, double seconds) { times_[tier].observe(bytes, seconds); }
  double load_seconds(const std::vector<TierLoad>& loads) const;  // per tier
  // Unless computing is clearly faster: by 50 ms, and in less than half of the time.
  bool worth(const std::vector<TierLoad>& loads, double compute_seconds) const;
  const TransferTime& time(size_t tier) const { return times_[tier]; }
  // Bytes/s of loading pages of so many bytes.
  double bytes_per_second(size_t tier, int64_t page_bytes) const;

 private:
  std::vector<TransferTime> times_;
};

// Seconds of a sequence's tokens [from, to).
double compute_range(const StepTime& time, int64_t chunk, int64_t from, int64_t to);

}  // namespace turbomind
