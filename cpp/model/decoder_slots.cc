#include "model/decoder_slots.h"

#include <unordered_set>

#include "core/error.h"
#include "model/mixers/attention_mixer.h"
#include "model/mixers/experts_mixer.h"
#include "model/mixers/mlp_mixer.h"
#include "model/mixers/per_layer_mixer.h"

namespace turbomind {

namespace {

int64_t packed_rows(int64_t rows, bool gate_up) {
  return gate_up ? 2 * round_up(rows / 2, kGateUpBlock) : rows;
}

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

void SlotList::add_linear(const std::string& name, LinearWeight* w, Cut cut, int64_t rows,
                          int64_t cols, bool gate_up) {
  Slot slot;
  const auto own = config_.slot_formats.find(name);
  const bool has_own = own != config_.slot_formats.end();
  slot.format = &weight_format(has_own ? own->second : config_.weight_format, place_);
  slot.linear = w;
  slot.spec = {name,
               rows,
               cols,
               true,
               gate_up,
               slot.format->name(),
               slot.format->packed_bytes(packed_rows(rows, gate_up), cols)};
  take_part(slot, cut);
  slot.part_format = rank_.count > 1 ? &slot.format->of_rows(slot.part.rows) : slot.format;
  slot.bytes = slot.part_format->packed_bytes(slot.packed_rows, slot.part.cols);
  slots_.push_back(slot);
}

void SlotList::take_part(Slot& slot, Cut cut) const {
  slot.cut = cut;
  slot.part = part_of(cut, place_, rank_, slot.spec.rows, slot.spec.cols, slot.spec.gate_up);
  slot.packed_rows = packed_rows(slot.part.row_count(), slot.spec.gate_up);
}

void SlotList::add_group(const std::string& prefix, const std::string& name, int count,
                         WeightGroup* group, Cut cut, int64_t rows, int64_t cols, bool gate_up) {
  group->weights.resize(count);
  const size_t first = slots_.size();
  for (int i = 0; i < count; ++i) {
    add_linear(prefix + std::to_string(i) + "." + name, &group->weights[i], cut, rows, cols,
               gate_up);
    const SlotSpec &a = slots_[first].spec, &b = slots_.back().spec;
    if (a.format != b.format)
      throw_error(ErrorCode::model, "weight ", b.name, " is ", b.format, ", expected ", a.format,
                  " as ", a.name);
  }
}

void SlotList::add_biases(const std::string& prefix, const std::string& name, int count,
                          WeightGroup* group, Cut cut, int64_t rows, bool gate_up) {
  group->biases.resize(count);
  for (int i = 0; i < count; ++i)
    add_vector(prefix + std::to_string(i) + "." + name, &group->biases[i], cut, rows, gate_up);
}

void SlotList::add_vector(const std::string& name, const float** v, Cut cut, int64_t rows,
                          bool gate_up) {
  Slot slot;
  slot.vector = v;
  const auto bytes = [](int64_t packed) { return round_up(packed, kKBlock) * sizeof(float); };
  slot.spec = {
      name, rows, 1, false, gate_up, dtype_name(DType::f32), bytes(packed_rows(rows, gate_up))};
  take_part(slot, cut);
  slot.bytes = bytes(slot.packed_rows);
  slots_.push_back(slot);
}

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
