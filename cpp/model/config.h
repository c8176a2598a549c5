// Description of a decoder-only model: one struct per layer, and the embedding and the head. No
// weights.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cache/kv_layout.h"
#include "ops/norm.h"
#include "ops/rope.h"

namespace turbomind {

// swiglu: Epilogue::swiglu_mul.
enum class Activation : uint8_t { silu, gelu_tanh, swiglu };

// Experts in place of the MLP, or beside it.
struct ExpertsConfig {
  int count = 0;  // 0: none
  int top_k = 0;
  int intermediate = 0;      // of an expert
  bool renormalize = false;  // weights of a token's experts have the sum 1
  bool router_bias = false;
  bool bias = false;       // of each expert's products
  bool scaled = false;     // a weight [count] scales the experts of a token
  bool own_norms = false;  // MLP and experts have norms of their own, each before and after
};

// All sizes in elements. The fused projection's rows are q heads, then k heads, then v heads.
struct LayerConfig {
  int heads = 0;
  int kv_heads = 0;
  int k_dim = 0;
  int v_dim = 0;
  int window = 0;        // 0: full attention
  int kv_layer = -1;     // earlier layer whose KV attention reads; -1: it writes its own
  int rope = 0;          // index into ModelConfig::ropes; -1: no rotation
  float attn_scale = 0;  // 0: 1/sqrt(k_dim)
  float softcap = 0;
  bool qk_norm = false;      // per-head RMS norm of q and k, weights [k_dim]
  bool qk_norm_all = false;  // RMS norm of q and of k across all heads
  bool sinks = false;        // AttentionShape::sinks
  bool v_norm = false;       // per-head RMS norm of v, without a weight
  bool qkv_bias = false;
  bool o_bias = false;
  Activation activation = Activation::silu;
  int intermediate = 0;   // 0: no MLP, where there are experts
  bool mlp_gate = false;  // beside experts: a weight [1, hidden] scales the MLP, by its sigmoid
  ExpertsConfig experts;
  bool mlp_bias = false;
  bool post_norms = false;  // norms after attention and MLP too
  float residual_scale = 1.0f;
  HeadSlice kv_slice;   // of a rank: where its KV heads are among all
  bool scaled = false;  // the residual stream is multiplied by a weight after the layer
};

struct ModelConfig {
  std::string fingerprint;  // seeds block hashes: equal fingerprints mean interchangeable KV
  int hidden = 0;
  int vocab = 0;
  int max_context = 0;  // tokens
  float norm_eps = 1e-6f;
  float norm_weight_offset = 0;
  float embed_scale = 1.0f;
  float logit_scale = 1.0f;  // before the cap
  float final_softcap = 0;
  bool tied_head = false;
  // Width of the per-layer inputs, rows of a second embedding that each layer mixes in; 0: none.
  int per_layer = 0;
  std::string weight_format = "bfloat16";           // of slots that slot_formats does not have
  std::map<std::string, std::string> slot_formats;  // formats by the name of a matrix's slot
  DType kv_dtype = DType::bf16;
  std::vector<RopeTable> ropes;
  std::vector<LayerConfig> layers;
};

// Returns the cache groups in order of first appearance (layers with the same kind of attention
// share one), and each layer's KvLayout inside its group's page; a layer that reads the KV of
// another has that one's. `tiled`: in the order that the CPU's kernels stream. Needs a valid
// config.
struct CachePlan {
  std::vector<CacheGroup> groups;
  std::vector<int> group_of_layer;
  std::vector<KvLayout> layout_of_layer;
};
CachePlan plan_cache(const ModelConfig& config, bool tiled = true);
// Returns the layouts of the layers whose KV is in a group's page, in order.
std::vector<KvLayout> layouts_of(const CachePlan& plan, int group);

// Throws Error(model) naming the first field that is out of range or inconsistent.
void validate(const ModelConfig& config);

}  // namespace turbomind
