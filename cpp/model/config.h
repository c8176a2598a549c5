// Description of a decoder-only model: one struct per layer, and the embedding and the head. No
// weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/kv_layout.h"
#include "ops/norm.h"
#include "ops/rope.h"

namespace turbomind {

enum class Activation : uint8_t { silu };
enum class MixerKind : uint8_t { dense };

// All sizes in elements. The fused projection's rows are q heads, then k heads, then v heads.
struct LayerConfig {
  int heads = 0;
  int kv_heads = 0;
  int k_dim = 0;
  int v_dim = 0;
  int window = 0;        // 0: full attention
  int rope = 0;          // index into ModelConfig::ropes; -1: no rotation
  float attn_scale = 0;  // 0: 1/sqrt(k_dim)
  float softcap = 0;
  bool qk_norm = false;  // per-head RMS norm of q and k, weights [k_dim]
  bool qkv_bias = false;
  bool o_bias = false;
  MixerKind mixer = MixerKind::dense;
  Activation activation = Activation::silu;
  int intermediate = 0;
  bool mlp_bias = false;
  float residual_scale = 1.0f;
};

struct ModelConfig {
  std::string fingerprint;  // seeds block hashes: equal fingerprints mean interchangeable KV
  int hidden = 0;
  int vocab = 0;
  int max_context = 0;  // tokens
  float norm_eps = 1e-6f;
  float norm_weight_offset = 0;
  float embed_scale = 1.0f;
  float final_softcap = 0;
  bool tied_head = false;
  std::string weight_format = "bfloat16";  // of every linear; see linear/weight_format.h
  DType kv_dtype = DType::bf16;
  std::vector<RopeTable> ropes;
  std::vector<LayerConfig> layers;
};

// Returns the cache groups in order of first appearance (layers with the same kind of attention
// share one), and each layer's KvLayout inside its group's page. `tiled`: in the order that the
// CPU's kernels stream. Needs a valid config.
struct CachePlan {
  std::vector<CacheGroup> groups;
  std::vector<int> group_of_layer;
  std::vector<KvLayout> layout_of_layer;
};
CachePlan plan_cache(const ModelConfig& config, bool tiled = true);

// Throws Error(model) naming the first field that is out of range or inconsistent.
void validate(const ModelConfig& config);

}  // namespace turbomind
