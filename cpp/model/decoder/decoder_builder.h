// Makes a decoder: has memory for its weights, packs them and checks them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/isa.h"
#include "core/tile_order.h"
#include "cuda/gpu_context.h"
#include "linear/weight_format.h"
#include "model/config.h"
#include "model/mixers/slot_list.h"
#include "model/model.h"

namespace turbomind {

class DecoderBuilder {
 public:
  // Validates the config and allocates the weights' memory (untouched until filled). `gpus` is
  // empty for the CPU, else it has the GPU where each rank lives and computes, and `isa` is what
  // the host helps with. With several ranks (tensor parallelism) slots are those of the whole
  // model; on the CPU `threads` are divided, and each rank has one at least. Ranks are on GPUs of
  // their own, or for checks on one, where they take turns. Throws Error(invalid_request) for
  // another number of GPUs than of ranks, for GPUs that differ, and for a model that cannot be cut
  // over so many.
  DecoderBuilder(const ModelConfig& config, Isa isa, int threads,
                 const std::vector<GpuOptions>& gpus = {}, int ranks = 1);
  ~DecoderBuilder();
  // The order of the model's AMX products; the default suits a first-level cache of 48 KiB.
  void set_tile_order(const TileOrder& order);
  const std::vector<SlotSpec>& slots() const;
  // Fills a slot from row segments of source tensors. Throws Error(model) naming the slot and both
  // shapes when they disagree. Vectors come as segments with cols == 1.
  void set(const std::string& slot, const std::vector<RowSegment>& segments);
  // Fills every slot not yet set with small reproducible values made from (seed, slot name).
  void fill_dummy(uint64_t seed);
  // Throws Error(model) naming the slots that were never set, or a slot with a NaN or infinity
  // when `check_finite`.
  std::unique_ptr<Model> finish(bool check_finite);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace turbomind
