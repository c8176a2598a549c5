// The packed weights of each mixer: what the builder fills and the mixer reads.
#pragma once

#include <cstdint>

#include "linear/weight_format.h"

namespace turbomind {

// Shapes are those of the whole model; a rank of several has a part of them (parallel/cut.h).
// Pointers are to memory of the context's device. Null vectors are absent ones (no bias, no q/k
// norm). Vectors are float32.
struct AttentionWeights {
  // [heads k_dim + kv_heads k_dim + kv_heads v_dim, hidden]; q alone with another layer's KV
  LinearWeight qkv;
  const float* qkv_bias = nullptr;
  const float* q_norm = nullptr;  // [k_dim], or [heads k_dim] across all heads
  const float* k_norm = nullptr;  // [k_dim], or [kv_heads k_dim]
  const float* sinks = nullptr;   // [heads]
  LinearWeight o;                 // [hidden, heads v_dim]
  const float* o_bias = nullptr;
};

struct MlpWeights {
  LinearWeight gate_up;  // [2 round_up(intermediate, 16), hidden], blocks of 16 alternate
  const float* gate_up_bias = nullptr;
  LinearWeight down;  // [hidden, intermediate]
  const float* down_bias = nullptr;
};

struct ExpertsWeights {
  LinearWeight router;  // [experts, hidden]
  const float* router_bias = nullptr;
  WeightGroup gate_up;  // of each expert as in MlpWeights
  WeightGroup down;
  LinearWeight mlp_gate;               // [1, hidden]
  const float* scale = nullptr;        // [experts]
  const float* router_norm = nullptr;  // own norms: [hidden] each
  const float* norm = nullptr;
  const float* post_norm = nullptr;
  const float* mlp_post_norm = nullptr;
};

// The block of a layer that mixes in its per-layer input.
struct PerLayerWeights {
  LinearWeight gate;  // [per_layer, hidden]
  LinearWeight out;   // [hidden, per_layer]
};

// The per-layer inputs of a step: (rows of the table + norm(a product with x)) / sqrt(2).
struct PerLayerInputWeights {
  LinearWeight embed;           // [vocab, layers per_layer], read by row, or the rows of a rank
  int64_t embed_begin = 0;      // from here on
  LinearWeight projection;      // [layers per_layer, hidden]
  const float* norm = nullptr;  // [per_layer]
};

}  // namespace turbomind
