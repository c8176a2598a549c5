// The memory of a model, of one that is being made and of one that is only described.
#pragma once

#include <vector>

#include "linear/weight_format.h"
#include "model/config.h"
#include "model/decoder/decoder_slots.h"
#include "model/model_memory.h"

namespace turbomind {

// Places the slots of all ranks in one arena, or on GPUs in one of each rank: sets their offsets,
// and returns their bytes with padding. Pages are left out.
ModelMemory place_slots(std::vector<std::vector<Slot>>& slots, WeightPlace place);

// Returns the memory of a model without making it. Throws what check_ranks() throws.
ModelMemory plan_memory(const ModelConfig& whole, WeightPlace place, int ranks);

}  // namespace turbomind
