// The weight slots of a decoder.
//
// Slots (i = layer): embed, head, final_norm, layers.i.attn_norm, .qkv, .qkv_bias, .q_norm,
// .k_norm, .o, .o_bias, .attn_post_norm, .mlp_norm, .gate_up, .gate_up_bias, .down, .down_bias,
// .mlp_post_norm; of layers with experts .router and (j = expert)
// .experts.j.gate_up and .experts.j.down, with .router_bias, .experts.j.gate_up_bias and
// .experts.j.down_bias, and .mlp_gate beside an MLP; .experts.scale, .experts.router_norm,
// .experts.norm, .experts.post_norm and .experts.mlp_post_norm of Gemma 4; .sinks of attention.
#pragma once

#include <vector>

#include "linear/weight_format.h"
#include "model/config.h"
#include "model/decoder/decoder_weights.h"
#include "model/mixers/slot_list.h"
#include "model/parallel/cut.h"

namespace turbomind {

// Returns the slots of a model, without making one. Throws Error(model) for a config out of range,
// and Error(invalid_request) for a format that the place does not have.
std::vector<SlotSpec> weight_slots(const ModelConfig& config, WeightPlace place);

// Declares the slots of a rank, whose weights will be in `weights`. `config` is that of the whole
// model; its layers stay where they are. Throws Error(model) for a format of a slot that the model
// does not have.
std::vector<Slot> declare_slots(const ModelConfig& config, WeightPlace place, Rank rank,
                                DecoderWeights& weights);

}  // namespace turbomind
