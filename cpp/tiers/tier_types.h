// Small types that pass between the engine's callers and the lower tiers: flushes, residence,
// speeds.
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

// A wait for everything that was posted for saving and removal. Any thread.
class Flush {
 public:
  // Waits for at most `seconds` (< 0: without limit). Returns false on time-out, or when the engine
  // has ended before everything was done.
  bool wait(double seconds);
  // Returns whether wait() would return at once.
  bool over();
  // Returns the pages that could not be saved and that the lowest tier lacks. Valid after wait().
  std::vector<BlockHash> unsaved();
  // Engine thread: releases the waiters. `done`: what wait() returns.
  void finish(bool done, std::vector<BlockHash> unsaved = {});

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false, done_ = false;
  std::vector<BlockHash> unsaved_;
};

// Result of the saves at the end of an engine.
struct LastSaves {
  bool done = true;     // everything was attempted within the time
  int64_t unsaved = 0;  // pages
  bool stuck = false;   // a tier did not return, as one whose disk hangs: its threads were detached
};

// Tokens of the longest prefix that the device has, and that each tier has together with the tiers
// above it.
struct Residence {
  int64_t device = 0;
  std::vector<int64_t> tiers;  // [lower tier]
};

// Where the KV of a sequence is, and the predicted seconds to the first token of its next turn.
struct Forecast {
  Residence where;
  double ttft = 0;
};

// Speeds measured so far; 0: not measured yet.
struct Speeds {
  std::vector<double> reads;    // bytes/s, [lower tier]
  double prefill = 0;           // tokens/s of a first chunk
  int64_t bytes_per_token = 0;  // of stored KV
};

}  // namespace turbomind
