#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "core/error.h"
#include "ops/routing.h"

namespace turbomind {

namespace {

// Bounds are far above any published model; beyond them a size is a corrupt or hostile config, and
// products of two of them still fit 64 bits.
constexpr int kMaxWidth = 1 << 20;
constexpr int kMaxVocab = 1 << 24;
constexpr int kMaxLayers = 4096;
constexpr int kMaxHeadDim = 1024;  // kMaxHeadWidth of ops/rope_kv_kernels.h
constexpr int kMaxContext = 1 << 28;

void check_range(const std::string& name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw_error(ErrorCode::model, name, " is ", value, ", expected ", low, " to ", high);
}

void check_finite(const std::string& name, float value, bool positive) {
  if (!std::isfinite(value) || (positive && value <= 0))
    throw_error(ErrorCode::model, name, " is ", value, ", expected a finite",
                positive ? " positive number" : " number");
}

void check_not_negative(const std::string& name, float value) {
  if (!std::isfinite(value) || value < 0)
    throw_error(ErrorCode::model, name, " is ", value, ", expected a finite number of 0 or more");
}

void validate_rope(const RopeTable& rope, const std::string& name) {
  check_range(name + ".inv_freq length", static_cast<int64_t>(rope.inv_freq.size()), 1, kMaxWidth);
  check_finite(name + ".attention_factor", rope.attention_factor, true);
  for (float f : rope.inv_freq) check_finite(name + ".inv_freq", f, false);
}

void validate_mlp(const LayerConfig& layer, const std::string& name) {
  const ExpertsConfig& e = layer.experts;
  if (e.count == 0)
    return check_range(name + ".intermediate", layer.intermediate, 1, kMaxWidth * 4);
  check_range(name + ".intermediate", layer.intermediate, 0, kMaxWidth * 4);
  check_range(name + ".experts.count", e.count, 1, kMaxExperts);
  check_range(name + ".experts.top_k", e.top_k, 1, std::min(e.count, kMaxTopK));
  check_range(name + ".experts.intermediate", e.intermediate, 1, kMaxWidth * 4);
  if (e.own_norms && (layer.intermediate == 0 || layer.mlp_gate || !layer.post_norms))
    throw_error(ErrorCode::model, name, ".experts.own_norms is true, expected it with post_norms, ",
                "and beside an MLP without a gate");
}

void validate_kv_layer(const ModelConfig& config, const LayerConfig& layer, int index,
                       const std::string& name) {
  check_range(name + ".kv_layer", layer.kv_layer, -1, index - 1);
  if (layer.kv_layer < 0) return;
  if (layer.qk_norm_all)
    throw_error(ErrorCode::model, name, " reads the KV of layer ", layer.kv_layer,
                " and has norms across all heads of q and k, expected one of the two");
  const LayerConfig& from = config.layers[layer.kv_layer];
  if (from.kv_layer >= 0 || from.kv_heads != layer.kv_heads || from.k_dim != layer.k_dim ||
      from.v_dim != layer.v_dim || from.window != layer.window)
    throw_error(ErrorCode::model, name, ".kv_layer is ", layer.kv_layer,
                ", expected a layer that writes its own KV, with ", layer.kv_heads, " heads of ",
                layer.k_dim, " and ", layer.v_dim, " and a window of ", layer.window);
}

void validate_layer(const ModelConfig& config, int index) {
  const LayerConfig& layer = config.layers[index];
  const std::string name = "layers[" + std::to_string(index) + "]";
  check_range(name + ".heads", layer.heads, 1, kMaxWidth);
  check_range(name + ".kv_heads", layer.kv_heads, 1, layer.heads);
  if (layer.heads % layer.kv_heads != 0)
    throw_error(ErrorCode::model, name, ".heads is ", layer.heads,
                ", expected a multiple of kv_heads ", layer.kv_heads);
  check_range(name + ".k_dim", layer.k_dim, 1, kMaxHeadDim);
  check_range(name + ".v_dim", layer.v_dim, 1, kMaxHeadDim);
  check_range(name + ".window", layer.window, 0, kMaxContext);
  validate_kv_layer(config, layer, index, name);
  validate_mlp(layer, name);
  check_range(name + ".rope", layer.rope, -1, static_cast<int64_t>(config.ropes.size()) - 1);
  if (layer.rope >= 0) {
    const int64_t rotated = 2 * static_cast<int64_t>(config.ropes[layer.rope].inv_freq.size());
    if (rotated > layer.k_dim)
      throw_error(ErrorCode::model, name, ": rope rotates ", rotated, " values, k_dim is ",
                  layer.k_dim);
  }
  check_not_negative(name + ".attn_scale", layer.attn_scale);
  check_not_negative(name + ".softcap", layer.softcap);
  check_finite(name + ".residual_scale", layer.residual_scale, false);
}

}  // namespace

void validate(const ModelConfig& config) {
  check_range("hidden", config.hidden, 1, kMaxWidth);
  check_range("vocab", config.vocab, 2, kMaxVocab);
  check_range("max_context", config.max_context, 1, kMaxContext);
  check_range("number of layers", static_cast<int64_t>(config.layers.size()), 1, kMaxLayers);
  check_finite("norm_eps", config.norm_eps, true);
  check_finite("norm_weight_offset", config.norm_weight_offset, false);
  check_finite("embed_scale", config.embed_scale, true);
  check_finite("logit_scale", config.logit_scale, true);
  check_not_negative("final_softcap", config.final_softcap);
  check_range("per_layer", config.per_layer, 0,
              kMaxWidth / static_cast<int64_t>(config.layers.size()));
  for (size_t i = 0; i < config.ropes.size(); ++i)
    validate_rope(config.ropes[i], "ropes[" + std::to_string(i) + "]");
  for (int i = 0; i < static_cast<int>(config.layers.size()); ++i) validate_layer(config, i);
}

CachePlan plan_cache(const ModelConfig& config, bool tiled) {
  CachePlan plan;
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& layer = config.layers[i];
    if (layer.kv_layer >= 0) {
      plan.group_of_layer.push_back(plan.group_of_layer[layer.kv_layer]);
      plan.layout_of_layer.push_back(plan.layout_of_layer[layer.kv_layer]);
      continue;
    }
    size_t g = 0;
    while (g < plan.groups.size() && plan.groups[g].window != layer.window) ++g;
    if (g == plan.groups.size()) {
      CacheGroup group;
      group.kind = layer.window ? CacheKind::window : CacheKind::full;
      group.window = layer.window;
      plan.groups.push_back(std::move(group));
    }
    CacheGroup& group = plan.groups[g];
    KvLayout layout;
    layout.dtype = config.kv_dtype;
    layout.kv_heads = layer.kv_heads;
    layout.slice = layer.kv_slice;
    layout.k_dim = layer.k_dim;
    layout.v_dim = layer.v_dim;
    layout.tiled = tiled;
    layout.offset = group.page_bytes;
    group.layers.push_back(static_cast<int>(i));
    group.page_bytes += layout.layer_bytes();
    plan.group_of_layer.push_back(static_cast<int>(g));
    plan.layout_of_layer.push_back(layout);
  }
  return plan;
}

std::vector<KvLayout> layouts_of(const CachePlan& plan, int group) {
  std::vector<KvLayout> layouts;
  for (const int layer : plan.groups[group].layers) layouts.push_back(plan.layout_of_layer[layer]);
  return layouts;
}

}  // namespace turbomind
