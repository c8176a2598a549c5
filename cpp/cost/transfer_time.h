// How long it takes to bring pages up from a lower tier, and to compute them instead.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "cost/step_time.h"

namespace turbomind {

// What a medium does: seconds for n bytes are about seconds_per_read + n / bytes_per_second.
struct ReadSpeed {
  double bytes_per_second = 1e9;
  double seconds_per_read = 1e-4;
};

// What one of `together` loads takes of a medium that reads so fast: they share it, and each checks
// and unpacks what it has read.
ReadSpeed load_speed(const ReadSpeed& medium, int together);

// Writes 8 MiB to a file of `folder` that nobody else sees, and reads it back past the page cache,
// 1 MiB at a time for a quarter of a second, though thrice at least. What counts are the fastest
// reads: others use the medium too. None when nothing can be written there.
std::optional<ReadSpeed> probe_read_speed(const std::string& folder);

// A running fit of fixed cost and speed, both >= 0, to the logarithms of the times that loads took:
// twice as long as predicted is as wrong as half as long. Later loads count more. The latest few of
// each size are kept, so that many small ones do not wash out what is known of large ones, and one
// that was held up counts only up to a bound. Not synchronised.
class TransferTime {
 public:
  explicit TransferTime(const ReadSpeed& first);  // believed until loads say otherwise
  void observe(int64_t bytes, double seconds);    // one load; allocates nothing
  double predict(int64_t bytes) const;            // seconds
  ReadSpeed speed() const { return speed_; }
  int64_t observed() const { return observed_; }  // loads

 private:
  struct Load {
    double bytes, seconds;
  };
  static constexpr size_t kKept = 8;  // of a size
  struct Latest {                     // the latest first
    std::array<Load, kKept> loads;
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

// Seconds that `tokens` take behind `past` others, in steps of `chunk` tokens of their own. While
// `step_time` knows nothing: as if `first_speed` tokens were computed per second.
double compute_seconds(const StepTime& step_time, int64_t tokens, int64_t past, int64_t chunk,
                       double first_speed);

}  // namespace turbomind
