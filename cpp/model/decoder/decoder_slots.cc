#include "model/decoder/decoder_slots.h"

#include <string>
#include <unordered_set>

#include "core/error.h"
#include "model/mixers/attention_mixer.h"
#include "model/mixers/experts_mixer.h"
#include "model/mixers/mlp_mixer.h"
#include "model/mixers/per_layer_mixer.h"

namespace turbomind {

namespace {

void declare_layer(SlotList& slots, const ModelConfig& config, size_t i, LayerWeights& w) {
  const LayerConfig& c = config.layers[i];
  const std::string p = "layers." + std::to_string(i) + ".";
  slots.add_vector(p + "attn_norm", &w.attn_norm, Cut::none, config.hidden);
  AttentionMixer::declare(slots, p, config.hidden, c, w.attention);
  if (c.post_norms)
    slots.add_vector(p + "attn_post_norm", &w.attn_post_norm, Cut::none, config.hidden);
  slots.add_vector(p + "mlp_norm", &w.mlp_norm, Cut::none, config.hidden);
  if (c.intermediate > 0) MlpMixer::declare(slots, p, config.hidden, c, w.mlp);
  if (c.experts.count > 0) ExpertsMixer::declare(slots, p, config.hidden, c, w.experts);
  if (c.post_norms)
    slots.add_vector(p + "mlp_post_norm", &w.mlp_post_norm, Cut::none, config.hidden);
  if (config.per_layer > 0) {
    PerLayerMixer::declare(slots, p, config, w.per_layer);
    slots.add_vector(p + "per_layer_post_norm", &w.per_layer_post_norm, Cut::none, config.hidden);
  }
  if (c.scaled) slots.add_vector(p + "scale", &w.scale, Cut::none, 1);
}

void check_formats(const ModelConfig& config, const std::vector<Slot>& slots) {
  std::unordered_set<std::string> matrices;
  for (const Slot& s : slots)
    if (s.linear != nullptr) matrices.insert(s.spec.name);
  for (const auto& [name, format] : config.slot_formats) {
    if (matrices.count(name) == 0)
      throw_error(ErrorCode::model, "slot_formats has ", name, " as ", format,
                  ", expected the name of a matrix of the model");
  }
}

}  // namespace

std::vector<Slot> declare_slots(const ModelConfig& config, WeightPlace place, Rank rank,
                                DecoderWeights& weights) {
  SlotList list(config, place, rank);
  weights.layers.resize(config.layers.size());
  list.add_linear("embed", &weights.embed, Cut::vocabulary, config.vocab, config.hidden);
  if (!config.tied_head)
    list.add_linear("head", &weights.head, Cut::vocabulary, config.vocab, config.hidden);
  list.add_vector("final_norm", &weights.final_norm, Cut::none, config.hidden);
  if (config.per_layer > 0) PerLayerInputs::declare(list, config, weights.per_layer);
  for (size_t i = 0; i < config.layers.size(); ++i)
    declare_layer(list, config, i, weights.layers[i]);
  std::vector<Slot> slots = list.take();
  check_formats(config, slots);
  return slots;
}

std::vector<SlotSpec> weight_slots(const ModelConfig& config, WeightPlace place) {
  validate(config);
  DecoderWeights weights;
  std::vector<SlotSpec> specs;
  for (const Slot& s : declare_slots(config, place, {}, weights)) specs.push_back(s.spec);
  return specs;
}

}  // namespace turbomind
