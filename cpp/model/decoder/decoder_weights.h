// The packed weights of a decoder: what the builder fills and the forward pass reads.
#pragma once

#include <memory>
#include <vector>

#include "cuda/device_or_host_buffer.h"
#include "linear/weight_format.h"
#include "model/mixers/mixer_weights.h"

namespace turbomind {

// Shapes and pointers are as in mixer_weights.h.
struct LayerWeights {
  const float* attn_norm = nullptr;  // each norm [hidden]
  AttentionWeights attention;
  const float* attn_post_norm = nullptr;
  const float* mlp_norm = nullptr;
  MlpWeights mlp;
  ExpertsWeights experts;
  const float* mlp_post_norm = nullptr;
  PerLayerWeights per_layer;
  const float* per_layer_post_norm = nullptr;
  const float* scale = nullptr;  // [1]; null: none
};

struct DecoderWeights {
  std::shared_ptr<Buffer> arena;  // of all ranks
  size_t bytes = 0;               // that this rank alone has there
  size_t shared_bytes = 0;        // of which all ranks read one copy
  // [vocab, hidden] each, or the rows of a rank from a first one on. A tied head is the embedding.
  LinearWeight embed;
  int64_t embed_begin = 0;
  LinearWeight head;
  int64_t head_begin = 0;
  const float* final_norm = nullptr;
  PerLayerInputWeights per_layer;
  std::vector<LayerWeights> layers;
};

}  // namespace turbomind
