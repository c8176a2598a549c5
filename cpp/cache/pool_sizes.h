// How many pages each cache group gets.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_layout.h"

namespace turbomind {

// Returns the most pages that the keys of one query can touch, its own included.
constexpr int64_t pages_of_window(int window) {
  return (static_cast<int64_t>(window) + kPageTokens - 2) / kPageTokens + 1;
}

struct PoolDemand {
  int64_t bytes = 0;  // of all pages; unused where `pages` is set
  int64_t pages = 0;  // of the group that reaches the furthest back; 0: as many as fit `bytes`
  int64_t rows = 0;   // most sequences of a step
  int64_t chunk = 0;  // most prompt tokens of a step
};

// Returns the number of pages of each group; all are 0 where not one page of each fits `bytes`.
//
// The group that reaches the furthest back, that of full attention where there is one, holds whole
// sequences, so it gets the most. Another one holds the windows of all rows, the chunks of two
// steps (asynchronous scheduling), the windows of two idle sequences, and windows of further ones
// in a ninth of the memory of the first group. It never gets more pages than that: a small cache
// has equal numbers.
std::vector<int64_t> pool_sizes(const std::vector<CacheGroup>& groups, const PoolDemand& demand);

}  // namespace turbomind
