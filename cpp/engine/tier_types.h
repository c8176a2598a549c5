// What the engine says about the tiers below the device.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cache/lower_tier.h"

namespace turbomind {

using TierPtrs = std::vector<std::unique_ptr<LowerTier>>;  // best first

// Somebody waits until what was posted has been saved.
class Flush {
 public:
  bool wait(double seconds);  // < 0: for ever; false on time-out, or when the engine has ended
  bool over();                // wait() waits no more
  void finish(bool done);

 private:
  std::mutex mutex_;
  std::condition_variable news_;
  bool over_ = false, done_ = false;
};

// Tokens of the longest beginning that can be had from a tier or from those above it.
struct Residence {
  int64_t device = 0;
  std::vector<int64_t> below;  // per tier
};

// Measured so far; 0: not yet.
struct Speeds {
  std::vector<double> reads;    // bytes/s, per tier below the device
  double prefill = 0;           // tokens/s, of a first chunk
  int64_t bytes_per_token = 0;  // of stored KV
};

}  // namespace turbomind
