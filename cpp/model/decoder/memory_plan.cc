#include "model/decoder/memory_plan.h"

#include "model/decoder/check_ranks.h"
#include "model/parallel/cut.h"

namespace turbomind {

namespace {

constexpr int64_t kSlotAlign = 256;  // bytes: a cache line of the CPU, what cuBLASLt likes best

}  // namespace

ModelMemory place_slots(std::vector<std::vector<Slot>>& slots, WeightPlace place) {
  ModelMemory memory;
  memory.ranks.resize(slots.size());
  const bool several = slots.size() > 1, one_arena = place == WeightPlace::host;
  std::vector<size_t> ends(one_arena ? 1 : slots.size());  // of the arenas
  for (size_t i = 0; i < slots[0].size(); ++i)
    for (size_t r = 0; r < slots.size(); ++r) {
      Slot& slot = slots[r][i];
      const bool shared = several && slot.cut.shared(place);
      size_t& end = ends[one_arena ? 0 : r];
      slot.offset = shared && r > 0 ? slots[0][i].offset : end;
      if (shared && r > 0) continue;
      const size_t bytes = round_up(static_cast<int64_t>(slot.bytes), kSlotAlign);
      (shared ? memory.shared_weights : memory.ranks[r].weights) += bytes;
      end += bytes;
    }
  return memory;
}

ModelMemory plan_memory(const ModelConfig& whole, WeightPlace place, int ranks) {
  check_ranks(whole, place, ranks);
  std::vector<std::vector<Slot>> slots;
  for (int r = 0; r < ranks; ++r) {
    DecoderWeights weights;
    slots.push_back(declare_slots(whole, place, {r, ranks}, weights));
  }
  ModelMemory memory = place_slots(slots, place);
  for (int r = 0; r < ranks; ++r)
    for (const CacheGroup& group :
         plan_cache(config_of(whole, {r, ranks}), place == WeightPlace::host).groups)
      memory.ranks[r].page_bytes.push_back(group.page_bytes);
  return memory;
}

}  // namespace turbomind
