#include "model/parallel/cut.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "model/decoder_slots.h"

namespace turbomind {

namespace {

// Part `rank` of `count` rows from `begin` on.
RowRange equal_part(int64_t begin, int64_t count, Rank rank) {
  const int64_t each = count / rank.count;
  return {begin + rank.index * each, begin + (rank.index + 1) * each};
}

// The KV heads of a rank: an equal part, or one of those that are fewer than the ranks.
RowRange kv_heads_of(int kv_heads, Rank rank) {
  if (kv_heads >= rank.count) return equal_part(0, kv_heads, rank);
  const int64_t head = int64_t{rank.index} * kv_heads / rank.count;
  return {head, head + 1};
}

std::vector<RowRange> rows_of_heads(const LayerConfig& layer, Rank rank, int64_t rows) {
  const RowRange heads = equal_part(0, layer.heads, rank), kv = kv_heads_of(layer.kv_heads, rank);
  const int64_t k_begin = int64_t{layer.heads} * layer.k_dim,
                v_begin = k_begin + int64_t{layer.kv_heads} * layer.k_dim;
  std::vector<RowRange> ranges = {{heads.begin * layer.k_dim, heads.end * layer.k_dim}};
  if (rows > k_begin) {  // not with the KV of another layer
    ranges.push_back({k_begin + kv.begin * layer.k_dim, k_begin + kv.end * layer.k_dim});
    ranges.push_back({v_begin + kv.begin * layer.v_dim, v_begin + kv.end * layer.v_dim});
  }
  return ranges;
}

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

int64_t SlotPart::row_count() const {
  int64_t count = 0;
  for (const RowRange& range : rows) count += range.size();
  return count;
}

SlotPart part_of(const Cut& cut, WeightPlace place, Rank rank, int64_t rows, int64_t cols,
                 bool gate_up) {
  SlotPart part{{{0, rows}}, 0, cols};
  if (rank.count == 1 || cut.shared(place)) return part;
  switch (cut.kind) {
    case Cut::none:
      break;
    case Cut::vocabulary:
      part.rows = {vocabulary_part(rows, rank)};
      break;
    case Cut::rows:
      if (gate_up)
        part.rows = {equal_part(0, rows / 2, rank), equal_part(rows / 2, rows / 2, rank)};
      else
        part.rows = {equal_part(0, rows, rank)};
      break;
    case Cut::columns: {
      const RowRange range = equal_part(0, cols, rank);
      part.col_begin = range.begin;
      part.cols = range.size();
      break;
    }
    case Cut::by_heads:
      part.rows = rows_of_heads(*cut.layer, rank, rows);
      break;
    case Cut::first_rank:
      if (rank.index > 0) part.rows.clear();
      break;
  }
  return part;
}

RowRange vocabulary_part(int64_t vocab, Rank rank) {
  const auto border = [&](int64_t index) {
    return std::min(vocab, round_up(vocab * index / rank.count, kPackRows));
  };
  return {border(rank.index), border(rank.index + 1)};
}

ModelConfig config_of(const ModelConfig& whole, Rank rank) {
  ModelConfig config = whole;
  if (rank.count == 1) return config;
  for (LayerConfig& layer : config.layers) {
    const RowRange kv = kv_heads_of(layer.kv_heads, rank);
    const int all = layer.kv_heads;
    layer.kv_slice.first = static_cast<int>(kv.begin);
    layer.kv_slice.all = all;
    layer.kv_slice.reads = all >= rank.count || rank.index % (rank.count / all) == 0;
    layer.heads /= rank.count;
    layer.kv_heads = static_cast<int>(kv.size());
    layer.intermediate /= rank.count;
    layer.experts.intermediate /= rank.count;
  }
  return config;
}

std::vector<CacheGroup> plan_groups(const ModelConfig& whole, int ranks) {
  std::vector<CacheGroup> groups = plan_cache(whole).groups;
  for (CacheGroup& group : groups) group.page_bytes = 0;
  for (int r = 0; r < ranks; ++r) {
    const CachePlan plan = plan_cache(config_of(whole, {r, ranks}));
    for (size_t g = 0; g < groups.size(); ++g) groups[g].page_bytes += plan.groups[g].page_bytes;
  }
  return groups;
}

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
