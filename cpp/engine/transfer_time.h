#pragma once
#include <cstddef>
namespace turbomind {
class TransferTime {
 public:
  void observe(size_t bytes, double seconds) { if (seconds > 0) speed_ = 0.7 * speed_ + 0.3 * bytes / seconds; }
  double predict(size_t bytes) const { return bytes / speed_; }
  double bytes_per_second() const { return speed_; }
 private:
  double speed_ = 1e9;
};
}
