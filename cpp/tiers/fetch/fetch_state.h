// The tiers' record of one sequence that a request runs: whether pages are being loaded for it, and
// where loading is tried next. The engine holds a pointer to it and never looks inside.
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>

#include "cache/sequence.h"

namespace turbomind {

// A sequence that may wait for pages of lower tiers, as its request describes it.
struct FetchClient {
  Sequence* seq = nullptr;
  // Rank: (priority, arrival, choice); lower ones are served first. Under memory pressure the fetch
  // of the highest one is cancelled first.
  int priority = 0;
  uint64_t arrival = 0;
  int choice = 0;
  bool exact = false;         // pages of another numerics fingerprint are not loaded
  bool crosses_holes = true;  // also loads pages that follow missing ones, once these are computed
};

// Owned by PageFetcher, from PageFetcher::add() to remove(). The scheduler reports what happens to
// the sequence; the fetcher writes everything else. Engine thread.
class FetchState {
 public:
  explicit FetchState(const FetchClient& client) : client_(client) {}

  // Returns whether the sequence is set aside until its pages have been loaded.
  bool fetching() const { return fetching_; }
  // Returns the first token that follows a hole: up to it pages are missing and must be computed,
  // from it on lower tiers have pages that are worth loading. kNoToken: there is no such token, or
  // it has not been looked for.
  int64_t hole_end() const { return hole_known_ ? hole_end_ : kNoToken; }
  // Tokens loaded for this sequence so far, and the first one of them (kNoToken: none).
  int64_t loaded_tokens() const { return loaded_tokens_; }
  int64_t first_loaded() const { return first_loaded_; }

  // Changes the priority of the sequence's rank.
  void set_priority(int priority) { client_.priority = priority; }
  // The sequence has got a slot. When it loses the slot, fetching is tried again.
  void begin_slot() { tried_ = false; }
  // The sequence was preempted; holes are looked for again.
  void end_slot() { hole_known_ = false; }
  // The sequence has computed `written` tokens, all of the hole. Fetching is tried again.
  void reach_hole_end(int64_t written) {
    tried_ = false;
    hole_known_ = false;
    crossed_at_ = written;
  }
  // Returns the `written` of the last reach_hole_end(), once; kNoToken: none since the last call.
  int64_t take_crossing() { return std::exchange(crossed_at_, kNoToken); }

 private:
  friend class PageFetcher;

  std::tuple<int, uint64_t, int> rank() const {
    return {client_.priority, client_.arrival, client_.choice};
  }
  void set_hole_end(int64_t token) {
    hole_known_ = true;
    hole_end_ = token;
  }

  FetchClient client_;
  bool fetching_ = false;
  bool tried_ = false;  // a fetch was begun since the sequence had a slot last
  int failures_ = 0;    // loads of the sequence that failed
  bool hole_known_ = false;
  int64_t hole_end_ = kNoToken;
  int64_t crossed_at_ = kNoToken;
  int64_t loaded_tokens_ = 0;
  int64_t first_loaded_ = kNoToken;
};

}  // namespace turbomind
