// The bytes of a model by rank.
#pragma once

#include <cstddef>
#include <vector>

namespace turbomind {

// What a rank alone has.
struct RankMemory {
  size_t weights = 0;              // packed
  std::vector<size_t> page_bytes;  // of a page of each cache group
};

// A model in one piece is one rank.
struct ModelMemory {
  size_t shared_weights = 0;  // packed, of which all ranks read one copy
  std::vector<RankMemory> ranks;

  size_t weights() const {  // of all ranks together
    size_t bytes = shared_weights;
    for (const RankMemory& rank : ranks) bytes += rank.weights;
    return bytes;
  }
};

}  // namespace turbomind
