// The engine's view of one session or request: token ids and the pages that hold their KV.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "cache/block_hash.h"

namespace turbomind {

constexpr int64_t kNoToken = std::numeric_limits<int64_t>::max();

struct Sequence {
  BlockHash root;
  int adapter = 0;
  float retention_priority = 0;
  bool persist = false;  // its pages are copied to the tiers below once they are sealed

  std::vector<int32_t> tokens;  // committed
  int64_t written = 0;          // KV exists for tokens [0, written); <= tokens.size()

  // Per cache group the page of tokens [64 j, 64 j + 64); -1 where a window no longer reaches.
  // ceil(written / 64) entries between steps, more while a step is being prepared.
  std::vector<std::vector<int32_t>> pages;
  std::vector<int64_t> first_held;  // per group: entries before this one are -1

  int64_t sealed = 0;           // pages [0, sealed) are full and were sealed
  std::vector<BlockHash> keys;  // of leading full pages of `tokens`, as far as computed
  int64_t posted = 0;           // persist: of the sealed pages those that were posted for saving

  // The KV from this token on, a page's first one, was made under another numerics fingerprint or
  // behind such KV.
  int64_t foreign_from = kNoToken;
  int64_t foreign() const { return foreign_from < written ? written - foreign_from : 0; }

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t pending() const { return length() - written; }
};

}  // namespace turbomind
