// What loading pages costs, and what computing them again would.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/step_time.h"
#include "engine/transfer_time.h"

namespace turbomind {

class FetchCost {
 public:
  explicit FetchCost(size_t tiers) : times_(tiers) {}

  void observe(size_t tier, size_t bytes, double seconds) { times_[tier].observe(bytes, seconds); }
  double load_seconds(const std::vector<size_t>& bytes) const;  // per tier
  // Of a sequence's tokens [from, to), in chunks; 0 while nothing is known.
  double compute_seconds(const StepTime& time, int64_t chunk, int64_t from, int64_t to) const;
  bool worth(const std::vector<size_t>& bytes, double compute_seconds) const;
  const TransferTime& of(size_t tier) const { return times_[tier]; }

 private:
  std::vector<TransferTime> times_;
};

}  // namespace turbomind
