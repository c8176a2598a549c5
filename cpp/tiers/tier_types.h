// What the engine says about the tiers below the device.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tiers/lower_tier.h"

namespace turbomind {

using TierPtrs = std::vector<std::unique_ptr<LowerTier>>;  // best first
using SharedTiers = std::shared_ptr<const TierPtrs>;

// Somebody waits until what was posted has come to its end.
class Flush {
 public:
  bool wait(double seconds);  // < 0: for ever; false on time-out, or when the engine has ended
  bool over();                // wait() waits no more
  // After wait(): pages that were to be saved, by whatever was posted up to then, and are not
  // below.
  std::vector<BlockHash> unsaved();
  void finish(bool done, std::vector<BlockHash> unsaved = {});

 private:
  std::mutex mutex_;
  std::condition_variable news_;
  bool over_ = false, done_ = false;
  std::vector<BlockHash> unsaved_;
};

// How it ended for the tiers.
struct LastSaves {
  bool done = true;     // within the time
  int64_t unsaved = 0;  // pages
  bool stuck = false;   // a tier did not come back: its threads are left behind
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
