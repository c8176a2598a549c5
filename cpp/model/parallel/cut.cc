#include "model/parallel/cut.h"

#include <algorithm>

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

}  // namespace turbomind
