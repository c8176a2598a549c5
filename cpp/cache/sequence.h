// A sequence as the KV cache sees it: token ids and the pages that hold their KV. Its part in a
// request is SequenceState (engine/request_state.h).
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "cache/block_hash.h"

namespace turbomind {

// A token index that is beyond every sequence: "none".
constexpr int64_t kNoToken = std::numeric_limits<int64_t>::max();

// The tokens where the last turn of a dialogue and its reply begin: undo and edit shorten the
// sequence to the first, retry to the second.
struct LastTurn {
  int64_t begin = 0;
  int64_t reply = 0;
};

struct Sequence {
  BlockHash root;
  int adapter = 0;
  float retention_priority = 0;
  bool persist = false;  // its pages are copied to the lower tiers once they are sealed

  std::vector<int32_t> tokens;  // committed: accepted and reported
  int64_t written = 0;          // KV exists for tokens [0, written); <= tokens.size()

  // Page table: per cache group the page of tokens [64 j, 64 j + 64); -1 where a window no longer
  // reaches.
  // ceil(written / 64) entries between steps, more while a step is being prepared.
  std::vector<std::vector<int32_t>> pages;
  std::vector<int64_t> first_held;  // per group: entries before this one are -1

  LastTurn last_turn;

  int64_t sealed = 0;           // pages [0, sealed) are full and were sealed
  std::vector<BlockHash> keys;  // block hashes of the first full pages, as far as computed
  int64_t posted = 0;           // persist: sealed pages [0, posted) were posted for saving

  // KV from this token on, the first one of a page, was computed under another numerics fingerprint
  // or from such KV.
  int64_t foreign_from = kNoToken;
  // Returns the number of tokens with such KV.
  int64_t foreign() const { return foreign_from < written ? written - foreign_from : 0; }

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  // Returns the number of tokens without KV.
  int64_t pending() const { return length() - written; }
};

}  // namespace turbomind
