// One forward pass for all decoder-only families, from a list of per-layer structs.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/isa.h"
#include "core/tile_order.h"
#include "cuda/gpu_context.h"
#include "linear/weight_format.h"
#include "model/config.h"
#include "model/model.h"
#include "ops/attention.h"

namespace turbomind {

// Slots (i = layer): embed, head, final_norm, layers.i.attn_norm, .qkv, .qkv_bias, .q_norm,
// .k_norm, .o, .o_bias, .attn_post_norm, .mlp_norm, .gate_up, .gate_up_bias, .down, .down_bias,
// .mlp_post_norm; of layers with experts .router and (j = expert)
// .experts.j.gate_up and .experts.j.down, with .router_bias, .experts.j.gate_up_bias and
// .experts.j.down_bias, and .mlp_gate beside an MLP; .experts.scale, .experts.router_norm,
// .experts.norm, .experts.post_norm and .experts.mlp_post_norm of Gemma 4; .sinks of attention.
struct SlotSpec {
  std::string name;
  int64_t rows = 0;
  int64_t cols = 0;      // 1 for vectors
  bool linear = false;   // packed in the weight format; otherwise a float32 vector
  bool gate_up = false;  // set with segments gate then up; stored in alternating blocks of 16 rows
  std::string format;    // name of the weight format
  size_t bytes = 0;      // packed, padding included
};

// Returns the slots of a model, without making one. Throws Error(model) for a config out of range,
// and Error(invalid_request) for a format that the place does not have.
std::vector<SlotSpec> weight_slots(const ModelConfig& config, WeightPlace place);

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
