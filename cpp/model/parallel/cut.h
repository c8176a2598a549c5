// How a model is cut over ranks (tensor parallelism): the part of each weight that a rank has, and
// the config of a rank's decoder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "linear/weight_format.h"
#include "model/config.h"

namespace turbomind {

constexpr int64_t kGateUpBlock = 16;  // rows of gate, then of up, that alternate when packed

// One of several ranks; by default the only one.
struct Rank {
  int index = 0;
  int count = 1;
};

// What a rank has of a weight. Each slot names its cut where it is declared.
struct Cut {
  enum Kind : uint8_t {
    none,        // all of it; on the CPU ranks read one copy
    rows,        // an equal part of the rows, of gates and of ups
    columns,     // an equal part of the columns, so that products are partial sums
    by_heads,    // the rows of its heads of fused q, k and v: Cut::heads()
    vocabulary,  // rows in multiples of kPackRows; on the CPU ranks read one copy of all
    first_rank,  // all of it, and other ranks nothing: what a sum over ranks has once
  };
  Kind kind;
  const LayerConfig* layer = nullptr;  // of by_heads: that of the whole model

  constexpr Cut(Kind k) : kind(k) {}  // NOLINT: a kind is a cut
  static Cut heads(const LayerConfig& layer) {
    Cut cut(by_heads);
    cut.layer = &layer;
    return cut;
  }
  // Whether the ranks of a place read one copy.
  constexpr bool shared(WeightPlace place) const {
    return place == WeightPlace::host && (kind == none || kind == vocabulary);
  }
};

// The part of a matrix [rows, cols] that a rank stores: rows of the whole in order, and a range of
// their columns.
struct SlotPart {
  std::vector<RowRange> rows;
  int64_t col_begin = 0;
  int64_t cols = 0;

  int64_t row_count() const;
};
SlotPart part_of(const Cut& cut, WeightPlace place, Rank rank, int64_t rows, int64_t cols,
                 bool gate_up);

// The rows of the vocabulary that a rank multiplies; none where there are fewer than ranks.
RowRange vocabulary_part(int64_t vocab, Rank rank);

// Returns the config of a rank's decoder. With fewer KV heads than ranks, neighbours have the same.
ModelConfig config_of(const ModelConfig& whole, Rank rank);

// Returns the cache groups with pages of all ranks together.
std::vector<CacheGroup> plan_groups(const ModelConfig& whole, int ranks);

}  // namespace turbomind
