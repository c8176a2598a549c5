// The bytes of a model by rank, of one that is loaded and of one that is only described.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace turbomind {

struct ModelConfig;
struct Slot;
enum class WeightPlace : uint8_t;

// What a rank alone has.
struct RankMemory {
  size_t weights = 0;              // packed
  std::vector<size_t> page_bytes;  // of a page of each cache group
};

// A model in one piece is one rank.
struct ModelMemory {
  size_t shared_weights = 0;  // packed, of which all ranks read one copy
  std::vector<RankMemory> ranks;

  size_t weights() const;  // of all ranks together
};

// Places the slots of all ranks in one arena, or on GPUs in one of each rank: sets their offsets,
// and returns their bytes with padding. Pages are left out.
ModelMemory place_slots(std::vector<std::vector<Slot>>& slots, WeightPlace place);

// Returns the memory of a model without making it. Throws what check_ranks() throws.
ModelMemory plan_memory(const ModelConfig& whole, WeightPlace place, int ranks);

}  // namespace turbomind
