// Binds the description of a model, and the cache groups that follow from it.
#include "model/config.h"
#include "model/decoder/check_ranks.h"

#include <algorithm>
#include <array>

#include "bindings/bindings.h"
#include "cache/pool_sizes.h"
#include "model/parallel/cut.h"

namespace turbomind::bindings {
namespace {

constexpr std::array<const char*, 3> kActivationNames = {"silu", "gelu_tanh", "swiglu"};

const char* kind_name(CacheKind kind) {
  switch (kind) {
    case CacheKind::full:
      return "full";
    case CacheKind::window:
      return "window";
    case CacheKind::latent:
      return "latent";
    case CacheKind::recurrent:
      return "recurrent";
  }
  return "unknown";
}

void bind_layer(py::module_& m) {
  py::class_<RopeTable> rope(m, "RopeTable", "Inverse frequencies of a rotary embedding, scaled.");
  rope.def(py::init<>());
  field(rope, "inv_freq", &RopeTable::inv_freq);
  field(rope, "attention_factor", &RopeTable::attention_factor);
  field(rope, "interleaved", &RopeTable::interleaved);

  py::class_<ExpertsConfig> experts(m, "ExpertsConfig", "Experts in place of an MLP.");
  experts.def(py::init<>());
  field(experts, "count", &ExpertsConfig::count);
  field(experts, "top_k", &ExpertsConfig::top_k);
  field(experts, "intermediate", &ExpertsConfig::intermediate);
  field(experts, "renormalize", &ExpertsConfig::renormalize);
  field(experts, "router_bias", &ExpertsConfig::router_bias);
  field(experts, "bias", &ExpertsConfig::bias);
  field(experts, "scaled", &ExpertsConfig::scaled);
  field(experts, "own_norms", &ExpertsConfig::own_norms);

  py::class_<LayerConfig> layer(m, "LayerConfig", "One decoder layer; sizes in elements.");
  layer.def(py::init<>());
  field(layer, "heads", &LayerConfig::heads);
  field(layer, "kv_heads", &LayerConfig::kv_heads);
  field(layer, "k_dim", &LayerConfig::k_dim);
  field(layer, "v_dim", &LayerConfig::v_dim);
  field(layer, "window", &LayerConfig::window);
  field(layer, "kv_layer", &LayerConfig::kv_layer);
  field(layer, "rope", &LayerConfig::rope);
  field(layer, "attn_scale", &LayerConfig::attn_scale);
  field(layer, "softcap", &LayerConfig::softcap);
  field(layer, "qk_norm", &LayerConfig::qk_norm);
  field(layer, "v_norm", &LayerConfig::v_norm);
  field(layer, "qkv_bias", &LayerConfig::qkv_bias);
  field(layer, "o_bias", &LayerConfig::o_bias);
  field(layer, "intermediate", &LayerConfig::intermediate);
  field(layer, "experts", &LayerConfig::experts);
  layer.def_property(
      "activation",
      [](const LayerConfig& l) { return kActivationNames.at(static_cast<size_t>(l.activation)); },
      [](LayerConfig& l, py::handle value) {
        const auto name = to_field<std::string>(value, "LayerConfig.activation");
        l.activation = to_choice<Activation>("LayerConfig.activation", name, kActivationNames);
      });
  field(layer, "mlp_bias", &LayerConfig::mlp_bias);
  field(layer, "mlp_gate", &LayerConfig::mlp_gate);
  field(layer, "qk_norm_all", &LayerConfig::qk_norm_all);
  field(layer, "sinks", &LayerConfig::sinks);
  field(layer, "post_norms", &LayerConfig::post_norms);
  field(layer, "residual_scale", &LayerConfig::residual_scale);
  field(layer, "scaled", &LayerConfig::scaled);
}

void bind_model_config(py::module_& m) {
  py::class_<ModelConfig> config(
      m, "ModelConfig", "A decoder-only model. Lists are copied in and out: assign them whole.");
  config.def(py::init<>());
  field(config, "fingerprint", &ModelConfig::fingerprint);
  field(config, "hidden", &ModelConfig::hidden);
  field(config, "vocab", &ModelConfig::vocab);
  field(config, "max_context", &ModelConfig::max_context);
  field(config, "norm_eps", &ModelConfig::norm_eps);
  field(config, "norm_weight_offset", &ModelConfig::norm_weight_offset);
  field(config, "embed_scale", &ModelConfig::embed_scale);
  field(config, "logit_scale", &ModelConfig::logit_scale);
  field(config, "final_softcap", &ModelConfig::final_softcap);
  field(config, "tied_head", &ModelConfig::tied_head);
  field(config, "per_layer", &ModelConfig::per_layer);
  field(config, "weight_format", &ModelConfig::weight_format);
  field(config, "slot_formats", &ModelConfig::slot_formats);
  config.def_property(
      "kv_dtype", [](const ModelConfig& c) { return dtype_name(c.kv_dtype); },
      [](ModelConfig& c, py::handle value) {
        const auto name = to_field<std::string>(value, "ModelConfig.kv_dtype");
        c.kv_dtype = to_dtype(name, "ModelConfig.kv_dtype", ErrorCode::invalid_request);
      });
  field(config, "ropes", &ModelConfig::ropes);
  field(config, "layers", &ModelConfig::layers);
}

}  // namespace

void bind_config(py::module_& m) {
  bind_layer(m);
  bind_model_config(m);
  py::class_<CacheGroup>(m, "CacheGroup", "Layers of equal attention window, which share pages.")
      .def_property_readonly("kind", [](const CacheGroup& g) { return kind_name(g.kind); })
      .def_property_readonly("window", [](const CacheGroup& g) { return g.window; })
      .def_property_readonly("layers", [](const CacheGroup& g) { return g.layers; })
      .def_property_readonly("page_bytes", [](const CacheGroup& g) { return g.page_bytes; });
  m.def(
      "pool_sizes",
      [](const std::vector<CacheGroup>& groups, int64_t bytes, int64_t pages, int64_t rows,
         int64_t chunk) { return pool_sizes(groups, {bytes, pages, rows, chunk}); },
      py::arg("groups"), py::kw_only(), py::arg("bytes"), py::arg("pages"), py::arg("rows"),
      py::arg("chunk"),
      "Returns the pages of each cache group: in `bytes`, or with `pages`, unless it is 0, for the "
      "group that reaches the furthest back. Steps have at most `rows` sequences and `chunk` "
      "prompt tokens.");
  m.def(
      "plan_cache",
      [](const ModelConfig& config, int ranks, bool gpu) {
        check_ranks(config, gpu ? WeightPlace::gpu : WeightPlace::host, ranks);
        return plan_groups(config, ranks);
      },
      py::arg("config"), py::arg("ranks") = 1, py::arg("gpu") = false,
      "Returns the cache groups of a model with the pages of all ranks. Raises ModelError for a "
      "config out of range, InvalidRequest for one that cannot be cut over so many ranks.");
}

}  // namespace turbomind::bindings
