#include "model/decoder/check_ranks.h"

#include <string>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "model/decoder/decoder_slots.h"

namespace turbomind {

namespace {

// Returns why the layers cannot be cut over `ranks`; empty if they can.
std::string layer_fault(const ModelConfig& config, int ranks) {
  for (size_t i = 0; i < config.layers.size(); ++i) {
    const LayerConfig& c = config.layers[i];
    const std::string name = "layer " + std::to_string(i) + " has ";
    const auto unequal = [&](int64_t count) { return count % ranks != 0; };
    if (unequal(c.heads)) return name + std::to_string(c.heads) + " heads";
    if (unequal(c.kv_heads) && ranks % c.kv_heads != 0)
      return name + std::to_string(c.kv_heads) + " KV heads";
    if (unequal(c.intermediate))
      return name + "an intermediate size of " + std::to_string(c.intermediate);
    if (c.experts.count > 0 && unequal(c.experts.intermediate))
      return name + "experts with an intermediate size of " +
             std::to_string(c.experts.intermediate);
    if (ranks > 1 && c.qk_norm_all) return name + "norms across all heads of q and k";
  }
  return "";
}

// Returns which weight's format cannot be cut; empty if all can.
std::string format_fault(const std::vector<Slot>& slots, int ranks) {
  if (ranks == 1) return "";
  for (const Slot& s : slots) {
    if (s.linear == nullptr) continue;
    const std::string name = "weight " + s.spec.name + " is " + s.spec.format + ", which ";
    if (s.cut.kind == Cut::vocabulary && !s.format->packs_pieces())
      return name + "cannot be cut by rows";
    if (s.cut.kind != Cut::columns) continue;
    const int64_t step = s.format->column_step(), cols = s.spec.cols / ranks;
    if (step == 0) return name + "cannot be cut by columns";
    if (cols % step != 0)
      return name + "is cut at multiples of " + std::to_string(step) + " columns, not of " +
             std::to_string(cols);
  }
  return "";
}

std::string fault(const ModelConfig& config, const std::vector<Slot>& slots, int ranks) {
  const std::string of_layers = layer_fault(config, ranks);
  return of_layers.empty() ? format_fault(slots, ranks) : of_layers;
}

}  // namespace

void check_ranks(const ModelConfig& whole, WeightPlace place, int ranks) {
  validate(whole);
  if (ranks == 1) return;
  if (ranks < 1) throw_error(ErrorCode::invalid_request, "tp is ", ranks, ", expected 1 or more");
  DecoderWeights weights;
  const std::vector<Slot> slots = declare_slots(whole, place, {}, weights);
  const std::string why = fault(whole, slots, ranks);
  if (why.empty()) return;
  std::vector<std::string> possible;
  for (int n = 1; n <= whole.layers[0].heads; ++n)
    if (whole.layers[0].heads % n == 0 && fault(whole, slots, n).empty())
      possible.push_back(std::to_string(n));
  throw_error(ErrorCode::invalid_request, "tp is ", ranks, ", but ", why, "; expected ",
              one_of(possible), " for this model");
}

}  // namespace turbomind
