// Predicts how long it takes to load pages from a lower tier, from a running fit, and to compute
// them instead.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "cost/step_time.h"

namespace turbomind {

// Speed of a medium: n bytes take about seconds_per_read + n / bytes_per_second.
struct ReadSpeed {
  double bytes_per_second = 1e9;
  double seconds_per_read = 1e-4;
};

// Returns the speed of one of `together` concurrent loads from `medium`: they share it, and each
// verifies and unpacks what it has read.
ReadSpeed load_speed(const ReadSpeed& medium, int together);

// Measures the disk of `folder`: writes 8 MiB to an unnamed file and reads it back with O_DIRECT, 1
// MiB at a time, for a quarter of a second but at least three times. The fastest reads count, since
// others use the disk too. Returns none when nothing can be written there.
std::optional<ReadSpeed> probe_read_speed(const std::string& folder);

// A running fit of fixed cost and speed, both >= 0, to the logarithms of load times: twice and half
// the prediction are equal errors. Later loads weigh more. The fit uses the latest few loads of
// each size, so that many small loads do not hide the time of large ones, and bounds a delayed one.
// Not synchronised.
class TransferTime {
 public:
  // `first`: the speed assumed until loads have been observed.
  explicit TransferTime(const ReadSpeed& first);
  // Records that one load of `bytes` took `seconds`. Allocates nothing.
  void observe(int64_t bytes, double seconds);
  // Returns seconds for one load of `bytes`.
  double predict(int64_t bytes) const;
  ReadSpeed speed() const { return speed_; }
  int64_t observed() const { return observed_; }  // loads

 private:
  struct Load {
    double bytes, seconds;
  };
  static constexpr size_t kLatest = 8;  // loads of a size
  struct Latest {                       // the latest first
    std::array<Load, kLatest> loads;
    size_t count = 0;
  };
  template <typename F>
  void each_load(F&& visit) const;
  void refit();

  std::array<Latest, 24> by_size_;  // index: half the bit width
  const ReadSpeed first_;
  ReadSpeed speed_;
  int64_t observed_ = 0;
};

// Returns seconds to compute `tokens` tokens after `past` others, in steps of at most `chunk`
// tokens. Before `step_time` has an observation it assumes `first_speed` tokens/s.
double compute_seconds(const StepTime& step_time, int64_t tokens, int64_t past, int64_t chunk,
                       double first_speed);

}  // namespace turbomind
