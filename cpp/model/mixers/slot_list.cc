#include "model/mixers/slot_list.h"

#include "core/error.h"

namespace turbomind {

namespace {

int64_t packed_rows(int64_t rows, bool gate_up) {
  return gate_up ? 2 * round_up(rows / 2, kGateUpBlock) : rows;
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

}  // namespace turbomind
