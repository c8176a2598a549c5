// The rows of an attention block: what their softmax has come to, which keys they see, how parts
// of their keys are merged. For files compiled once per instruction set.
#pragma once

#include "cpu/vec.h"
#include "ops/attention_kernels.h"

namespace turbomind::TM_ISA_NS {

constexpr float kLog2E = 1.44269504f;
// The first value of a running maximum: below any score, and finite so that differences are.
constexpr float kLowest = -1e30f;

// Results of rows over some of their keys: sum and output are relative to 2^top.
struct RowParts {
  float* out;  // [rows][v_width], not yet divided
  float* top;  // [rows]
  float* sum;  // [rows]
};

static int64_t query_of(const AttentionBlock& b, int row) {
  return b.kv_begin + (b.m_begin + row) / b.group;
}

// The lowest key that a row sees.
static int64_t lowest_key(const AttentionBlock& b, int row) {
  const int64_t lowest = b.window ? query_of(b, row) - b.window + 1 : 0;
  return lowest > 0 ? lowest : 0;
}

struct RowRange {
  int begin, end;
};

// The rows of [from, to) that see any of the keys [first_key, first_key + keys).
static RowRange rows_of(const AttentionBlock& b, int from, int to, int64_t first_key, int keys) {
  RowRange r{from, to};
  const int64_t before = (first_key - b.kv_begin) * b.group - b.m_begin;
  if (before > r.begin) r.begin = before < to ? static_cast<int>(before) : to;
  if (b.window) {
    const int64_t after = (first_key + keys + b.window - 1 - b.kv_begin) * b.group - b.m_begin;
    if (after < r.end) r.end = after > from ? static_cast<int>(after) : from;
  }
  return r;
}

// What merging further keys makes of the maxima and sums of kLanes rows, and of their outputs.
struct MergeFactors {
  float top[kLanes], sum[kLanes], keep[kLanes], add[kLanes];
};

static MergeFactors merge_factors(VecF to_top, VecF to_sum, VecF top, VecF sum) {
  MergeFactors f;
  const VecF most = max(top, to_top);
  const VecF keep = exp2_nonpositive(to_top - most), add = exp2_nonpositive(top - most);
  store(f.top, most);
  store(f.sum, fma(sum, add, to_sum * keep));
  store(f.keep, keep);
  store(f.add, add);
  return f;
}

static void set_row(const RowParts& to, int row, const float* out, float top, float sum,
                    int width) {
  std::memcpy(to.out + row * width, out, sizeof(float) * width);
  to.top[row] = top;
  to.sum[row] = sum;
}

// Merges further outputs of row `row`, whose factors are those of lane `lane`.
static void merge_row(const RowParts& to, int row, const float* out, const MergeFactors& f,
                      int lane, int width) {
  const VecF keep = broadcast(f.keep[lane]), add = broadcast(f.add[lane]);
  float* o = to.out + row * width;
  for (int c = 0; c < width; c += kLanes) {
    store(o + c, fma(load(out + c), add, load(o + c) * keep));
  }
  to.top[row] = f.top[lane];
  to.sum[row] = f.sum[lane];
}

// The same for row 0 alone; `first`: it has no keys yet.
static void merge_one(const RowParts& to, const float* out, float top, float sum, bool first,
                      int width) {
  if (first) return set_row(to, 0, out, top, sum, width);
  const MergeFactors f =
      merge_factors(broadcast(*to.top), broadcast(*to.sum), broadcast(top), broadcast(sum));
  merge_row(to, 0, out, f, 0, width);
}

// Merges the rows' results over the unit [first_key, first_key + keys) into those over what begins
// at `outer_begin`.
static void merge_rows(const AttentionBlock& b, const RowParts& to, const RowParts& from,
                       int64_t first_key, int keys, int64_t outer_begin) {
  const RowRange rows = rows_of(b, 0, b.m_count, first_key, keys);
  const int width = b.v_width;
  for (int r = rows.begin; r < rows.end; r += kLanes) {
    const MergeFactors f =
        merge_factors(load(to.top + r), load(to.sum + r), load(from.top + r), load(from.sum + r));
    for (int i = r; i < rows.end && i < r + kLanes; ++i) {
      const float* out = from.out + i * width;
      // Rows of a window begin at different units.
      if (first_key <= outer_begin || (b.window && lowest_key(b, i) >= first_key)) {
        set_row(to, i, out, from.top[i], from.sum[i], width);
      } else {
        merge_row(to, i, out, f, i - r, width);
      }
    }
  }
}

static void store_partial(const AttentionBlock& b, const RowParts& from) {
  const int keys = static_cast<int>(b.key_end - b.key_begin);
  const RowRange rows = rows_of(b, 0, b.m_count, b.key_begin, keys);
  const int64_t tops = int64_t{b.m_count} * b.v_width;
  for (int r = rows.begin; r < rows.end; ++r) {
    std::memcpy(b.partial + int64_t{r} * b.v_width, from.out + r * b.v_width,
                sizeof(float) * b.v_width);
    b.partial[tops + r] = from.top[r];
    b.partial[tops + b.m_count + r] = from.sum[r];
  }
}

// Divides a row by its sum and stores it. A sink is one more key, with its score and no value.
static void finish_row(const AttentionBlock& b, int row, const float* out, float top, float sum) {
  const int64_t i = (b.m_begin + row) / b.group, g = (b.m_begin + row) % b.group;
  const int64_t at = i * b.out_stride + g * b.v_dim;
  VecF keep = broadcast(1.0f), total = broadcast(sum);
  if (b.sinks) {
    const float sink = b.sinks[g] * kLog2E, most = sink > top ? sink : top;
    keep = exp2_nonpositive(broadcast(top - most));
    total = fma(total, keep, exp2_nonpositive(broadcast(sink - most)));
  }
  for (int c = 0; c < b.v_dim; c += kLanes) {
    const int n = b.v_dim - c < kLanes ? b.v_dim - c : kLanes;
    const VecF v = load(out + c) * keep / total;
    if (b.bf16_out) {
      store_bf16_n(static_cast<uint16_t*>(b.out) + at + c, v, n);
    } else {
      store_n(static_cast<float*>(b.out) + at + c, v, n);
    }
  }
}

static void finish_rows(const AttentionBlock& b, const RowParts& from) {
  for (int r = 0; r < b.m_count; ++r) {
    finish_row(b, r, from.out + r * b.v_width, from.top[r], from.sum[r]);
  }
}

// Merges the partial results of every row; `span` and `total` have room for one row.
static void merge_units(const AttentionBlock& b, const AttentionUnits& units, const RowParts& span,
                        const RowParts& total) {
  constexpr int kSplits = kTaskSpanKeys / kTaskSplitKeys;
  const int64_t tops = int64_t{b.m_count} * b.v_width;
  for (int r = 0; r < b.m_count; ++r) {
    const int64_t first = lowest_key(b, r) / units.keys, last = query_of(b, r) / units.keys;
    for (int64_t u = first; u <= last; ++u) {
      const float* p = b.partial + (u - units.first) * units.stride;
      const float *out = p + int64_t{r} * b.v_width, *top = p + tops + r, *sum = top + b.m_count;
      if (units.keys == kTaskSpanKeys) {
        merge_one(total, out, *top, *sum, u == first, b.v_width);
        continue;
      }
      merge_one(span, out, *top, *sum, u == first || u % kSplits == 0, b.v_width);
      if (u < last && (u + 1) % kSplits != 0) continue;
      merge_one(total, span.out, *span.top, *span.sum, u / kSplits == first / kSplits, b.v_width);
    }
    finish_row(b, r, total.out, *total.top, *total.sum);
  }
}

}  // namespace turbomind::TM_ISA_NS
