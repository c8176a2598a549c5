// The packed weights of a decoder: what the builder fills and the forward pass reads.
#pragma once

#include <vector>

#include "cuda/device_or_host_buffer.h"
#include "linear/weight_format.h"

namespace turbomind {

// Pointers are to memory of the context's device. Null vectors are absent ones (no bias, no q/k
// norm). Vectors are float32.
struct LayerWeights {
  const float* attn_norm = nullptr;  // [hidden]
  LinearWeight qkv;                  // [heads k_dim + kv_heads k_dim + kv_heads v_dim, hidden]
  const float* qkv_bias = nullptr;
  const float* q_norm = nullptr;  // [k_dim]
  const float* k_norm = nullptr;  // [k_dim]
  LinearWeight o;                 // [hidden, heads v_dim]
  const float* o_bias = nullptr;
  const float* mlp_norm = nullptr;  // [hidden]
  LinearWeight gate_up;  // [2 round_up(intermediate, 16), hidden], blocks of 16 alternate
  const float* gate_up_bias = nullptr;
  LinearWeight down;  // [hidden, intermediate]
  const float* down_bias = nullptr;
};

struct DecoderWeights {
  Buffer arena;
  LinearWeight embed;  // [vocab, hidden]
  LinearWeight head;   // [vocab, hidden]; the embedding's memory when tied
  const float* final_norm = nullptr;
  std::vector<LayerWeights> layers;
};

}  // namespace turbomind
