// Binds the description of a model, and the cache groups that follow from it.
#include "model/config.h"

#include "bindings/bindings.h"

namespace turbomind::bindings {
namespace {

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

  py::class_<LayerConfig> layer(m, "LayerConfig", "One decoder layer; sizes in elements.");
  layer.def(py::init<>());
  field(layer, "heads", &LayerConfig::heads);
  field(layer, "kv_heads", &LayerConfig::kv_heads);
  field(layer, "k_dim", &LayerConfig::k_dim);
  field(layer, "v_dim", &LayerConfig::v_dim);
  field(layer, "window", &LayerConfig::window);
  field(layer, "rope", &LayerConfig::rope);
  field(layer, "attn_scale", &LayerConfig::attn_scale);
  field(layer, "softcap", &LayerConfig::softcap);
  field(layer, "qk_norm", &LayerConfig::qk_norm);
  field(layer, "qkv_bias", &LayerConfig::qkv_bias);
  field(layer, "o_bias", &LayerConfig::o_bias);
  field(layer, "intermediate", &LayerConfig::intermediate);
  field(layer, "mlp_bias", &LayerConfig::mlp_bias);
  field(layer, "residual_scale", &LayerConfig::residual_scale);
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
  field(config, "final_softcap", &ModelConfig::final_softcap);
  field(config, "tied_head", &ModelConfig::tied_head);
  field(config, "weight_format", &ModelConfig::weight_format);
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
      "plan_cache",
      [](const ModelConfig& config) {
        validate(config);
        return plan_cache(config).groups;
      },
      py::arg("config"),
      "Returns the cache groups of a model. Raises ModelError for a config out of range.");
}

}  // namespace turbomind::bindings
