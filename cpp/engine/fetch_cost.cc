#include "engine/fetch_cost.h"

#include <algorithm>

namespace turbomind {

namespace {
// Computing keeps the machine from serving others, loading does not: what loads within this time is
// loaded.
constexpr double kBarelyNoticed = 0.01;  // seconds
}  // namespace

double FetchCost::load_seconds(const std::vector<size_t>& bytes) const {
  double seconds = 0;
  for (size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] > 0) seconds += times_[i].predict(bytes[i]);
  return seconds;
}

double FetchCost::compute_seconds(const StepTime& time, int64_t chunk, int64_t from,
                                  int64_t to) const {
  double ms = 0;
  for (int64_t begin = from; begin < to; begin += chunk) {
    StepCost cost;
    cost.add(std::min(chunk, to - begin), begin);
    ms += time.predict(cost);
  }
  return ms / 1000;
}

bool FetchCost::worth(const std::vector<size_t>& bytes, double compute_seconds) const {
  if (compute_seconds == 0) return true;  // nothing was computed yet
  return load_seconds(bytes) <= compute_seconds + kBarelyNoticed;
}

}  // namespace turbomind
