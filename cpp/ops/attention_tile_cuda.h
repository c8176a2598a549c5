// Code that the attention kernels share: K and V on their way through shared memory, the products
// of a split, and the merging of partial results. For *_cuda.cu files.
//
// A slab is 128 keys by 64 columns of K or V, 16 KiB in shared memory: rows of 128 bytes whose
// 16-byte units are swizzled by the row, so that ldmatrix meets every bank once.
//
// Row-invariance: all arithmetic of a row is in this file's functions, sums of products are written
// as fma, and what is skipped (keys that no row of a warp sees) would have added exact zeros.
#pragma once

#include "cuda/kernel.h"
#include "ops/attention_cuda.h"

#ifndef TM_UNROLL
#ifdef TM_CUDA_EMULATED
#define TM_UNROLL
#else
#define TM_UNROLL _Pragma("unroll")
#endif
#endif
#ifdef TM_CUDA_EMULATED
#define TM_ROLLED
#else
#define TM_ROLLED _Pragma("unroll 1")  // what is inlined in it is large
#endif

namespace turbomind::TM_CUDA_NS {

constexpr int kPageTokens = 64;
constexpr int kSlabDims = 64;
constexpr int kSlabRowBytes = 2 * kSlabDims;
constexpr int kSlabBytes = kSplitTokens * kSlabRowBytes;
constexpr int kMaxSlabs = kMaxHeadDim / kSlabDims;
constexpr int kKeyPieces = kSplitTokens / 16;  // k steps of the second product
constexpr int kTileRows = 16;                  // of an mma
constexpr int kWholeThreads = 128;             // of the blocks that copy slabs without conditions
constexpr float kLog2E = 1.44269504f;
constexpr float kNothing = -INFINITY;  // the maximum of no key

TM_DEVICE int slabs_of(int dim) {
  return (dim + kSlabDims - 1) / kSlabDims;
}

// Bytes from a slab's begin to 16-byte unit `unit` (of 8) of row `row`.
TM_DEVICE int slab_offset(int row, int unit) {
  return row * kSlabRowBytes + ((unit ^ (row & 7)) << 4);
}

// The query heads that share one load of K and V.
struct HeadPart {
  int kv_head, first_head, heads;
};
TM_DEVICE HeadPart head_part(const AttentionLaunch& w, int index) {
  const int group = w.args.heads / w.args.kv_heads;
  const int kv_head = index / w.plan.parts, begin = index % w.plan.parts * w.plan.part_heads;
  return {kv_head, kv_head * group + begin, min(w.plan.part_heads, group - begin)};
}

// The first key a query sees.
TM_DEVICE int lowest_key(const AttentionCudaArgs& a, int position) {
  return a.window ? max(position - a.window + 1, 0) : 0;
}

// The splits that a block takes, in order: every `stride`-th, or those of every `stride`-th span.
struct SplitOrder {
  int last;
  int stride;
  bool spans;

  TM_DEVICE int next(int split) const {
    if (!spans) return split + stride;
    if ((split + 1) % kSpanSplits != 0) return split + 1;
    return (split / kSpanSplits + stride) * kSpanSplits;
  }
  TM_DEVICE bool ends_span(int split) const {
    return (split + 1) % kSpanSplits == 0 || split == last;
  }
};

// Issues the loads of one head's slabs, split after split: its K slabs, then its V slabs.
struct SlabLoader {
  const AttentionCudaArgs& a;
  SplitOrder order;
  const int32_t* table;  // the sequence's pages
  int kv_head;
  int lo, hi;  // keys [lo, hi) are read; the rest of a 16-key piece becomes zero
  int split = 0, slab = 0;
  int2 ids{}, next_ids{};  // pages of this split and the one after it, loaded early

  TM_DEVICE void start(int first) {
    split = first;
    ids = pages_of(first);
    next_ids = pages_of(order.next(first));
  }

  // The pages of a split; one that holds no key in reach counts as page 0 and is not read.
  TM_DEVICE int2 pages_of(int s) const {
    if (s > order.last) return make_int2(0, 0);
    const int middle = s * kSplitTokens + kPageTokens;
    const int32_t* p = table + 2 * s;
    return make_int2(lo < middle ? load_constant(p) : 0, hi > middle ? load_constant(p + 1) : 0);
  }

  // Starts the next slab's copies into `stage`, if there is one. The caller commits.
  TM_DEVICE void issue(uint8_t* stage) {
    if (split > order.last) return;
    const int k_slabs = slabs_of(a.k_dim);
    const bool k = slab < k_slabs;
    copy(stage, k ? a.pages.k_offset : a.pages.v_offset, k ? a.k_dim : a.v_dim,
         (k ? slab : slab - k_slabs) * kSlabDims);
    if (++slab < k_slabs + slabs_of(a.v_dim)) return;
    slab = 0;
    split = order.next(split);
    ids = next_ids;
    next_ids = pages_of(order.next(split));
  }

  TM_DEVICE void copy(uint8_t* stage, int64_t offset, int dim, int column) const {
    const int first = split * kSplitTokens;
    const int begin = max(lo - first, 0), end = min(hi - first, kSplitTokens);
    const int unit = threadIdx.x % 8, row = threadIdx.x / 8;
    const int64_t at = offset + (int64_t{kv_head} * kPageTokens * dim + column + unit * 8) * 2;
    const uint8_t* page0 = a.pages.base + ids.x * a.pages.page_bytes + at;
    const uint8_t* page1 = a.pages.base + ids.y * a.pages.page_bytes + at;
    if (begin == 0 && end == kSplitTokens && column + kSlabDims <= dim &&
        blockDim.x == kWholeThreads) {
      uint8_t* to = stage + slab_offset(row, unit);
      copy_page(to, page0 + row * dim * 2, dim);
      copy_page(to + kPageTokens * kSlabRowBytes, page1 + row * dim * 2, dim);
    } else if (unit * 8 < (dim - column + 15) / 16 * 16) {
      copy_rows(stage, page0, page1, begin, end, dim, column + unit * 8 < dim);
    }
  }

  // A thread's share of one page's half of a slab, every row of which is in reach.
  TM_DEVICE static void copy_page(uint8_t* to, const uint8_t* from, int dim) {
    constexpr int kRows = kWholeThreads / 8;
    TM_UNROLL for (int i = 0; i < kPageTokens / kRows; ++i)
        copy_async16(to + i * kRows * kSlabRowBytes, from + i * kRows * dim * 2, true);
  }

  TM_DEVICE static void copy_rows(uint8_t* stage, const uint8_t* page0, const uint8_t* page1,
                                  int begin, int end, int dim, bool inside) {
    const int unit = threadIdx.x % 8, rows = blockDim.x / 8;  // rows: a multiple of 8
    int row = (begin & ~15) + static_cast<int>(threadIdx.x) / 8;
    uint8_t* to = stage + slab_offset(row, unit);
    TM_ROLLED for (; row < ((end + 15) & ~15); row += rows, to += rows * kSlabRowBytes) {
      const uint8_t* from = (row < kPageTokens ? page0 : page1) + (row % kPageTokens) * dim * 2;
      copy_async16(to, from, inside && row >= begin && row < end);
    }
  }
};

// Starts the copies of query rows 0..tile_rows - 1 into slabs of `tile_rows` rows; row r is head
// first_head + r % heads of token `token` + r / heads. Rows from `rows` on become zero.
TM_DEVICE void copy_queries(const AttentionCudaArgs& a, const HeadPart& part, int token, int rows,
                            int tile_rows, uint8_t* q) {
  const int units = (a.k_dim + 15) / 16 * 2;
  TM_ROLLED for (int i = threadIdx.x; i < tile_rows * units; i += blockDim.x) {
    const int row = i / units, unit = i % units;
    const bool valid = row < rows && unit * 8 < a.k_dim;
    const int64_t at =
        int64_t{token + row / part.heads} * a.heads + part.first_head + row % part.heads;
    uint8_t* to = q + unit / 8 * tile_rows * kSlabRowBytes + slab_offset(row, unit % 8);
    copy_async16(to, static_cast<const uint16_t*>(a.q) + (valid ? at * a.k_dim + unit * 8 : 0),
                 valid);
  }
}

// Two tiles of 8 columns: c += a b.
template <typename T>
TM_DEVICE void multiply_pair(float (*c)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  const uint32_t b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
  mma16816<T>(c[0], a, b0);
  mma16816<T>(c[1], a, b1);
}

// s += q k^T over one slab's columns, for keys 16 (first_piece + j) + 0..15, pieces j in
// [from, to) of kPieces. Lane l has of tile t, rows l / 4 and l / 4 + 8, keys 8 t + l % 4 * 2 +
// 0, 1.
//
// Where all pieces and columns are wanted, no instruction is conditional, and the fragments of the
// next piece are loaded while those of this one are multiplied.
template <typename T, int kPieces>
TM_DEVICE void multiply_scores(float (*s)[4], const uint8_t* q_slab, const uint8_t* k_slab,
                               int first_piece, int from, int to, int columns) {
  const int lane = lane_index();
  const uint8_t* k = k_slab + (first_piece * 16 + lane % 8 + lane / 16 * 8) * kSlabRowBytes;
  const auto unit = [&](int step) { return ((step * 2 + lane / 8 % 2) ^ (lane % 8)) << 4; };
  uint32_t a[4];
  if (from <= 0 && to >= kPieces && columns >= kSlabDims) {
    constexpr int kLoads = kSlabDims / 16 * kPieces;
    uint32_t b[2][4];
    ldmatrix_x4(b[0], k + unit(0));
    TM_UNROLL for (int i = 0; i < kLoads; ++i) {
      const int step = i / kPieces, j = i % kPieces;
      if (j == 0) ldmatrix_x4(a, q_slab + slab_offset(lane % 16, step * 2 + lane / 16));
      if (i + 1 < kLoads)
        ldmatrix_x4(b[(i + 1) % 2],
                    k + (i + 1) % kPieces * 16 * kSlabRowBytes + unit((i + 1) / kPieces));
      multiply_pair<T>(s + 2 * j, a, b[i % 2]);
    }
    return;
  }
  TM_UNROLL for (int step = 0; step < kSlabDims / 16; ++step) {
    if (step * 16 >= columns) break;
    ldmatrix_x4(a, q_slab + slab_offset(lane % 16, step * 2 + lane / 16));
    TM_UNROLL for (int j = 0; j < kPieces; ++j) {
      if (j < from || j >= to) continue;
      uint32_t b[4];
      ldmatrix_x4(b, k + j * 16 * kSlabRowBytes + unit(step));
      multiply_pair<T>(s + 2 * j, a, b);
    }
  }
}

// The factor that takes scores to base 2, after cap_scores.
TM_DEVICE float score_factor(const AttentionCudaArgs& a) {
  return (a.softcap > 0 ? a.softcap : a.scale) * kLog2E;
}

// tanh(s * scale / softcap), with an absolute error of about 1e-7: small beside the weights'
// rounding.
TM_DEVICE float cap_score(const AttentionCudaArgs& a, float s) {
  return 1 - 2 / (fast_exp2(s * (2 * kLog2E * a.scale / a.softcap)) + 1);
}

// Caps the scores of kTiles tiles from key first_key on, and takes out what a row does not see: row
// r of the lane's two sees keys [low[r], high[r]) of the split. Raises top[r] to the greatest.
template <int kTiles>
TM_DEVICE void mask_scores(const AttentionCudaArgs& a, float (*s)[4], int first_key,
                           const int (&low)[2], const int (&high)[2], float (&top)[2]) {
  const int end = first_key + kTiles * 8;
  const bool whole = max(low[0], low[1]) <= first_key && min(high[0], high[1]) >= end;
  if (a.softcap > 0) {
    TM_UNROLL for (int t = 0; t < kTiles; ++t) TM_UNROLL for (int e = 0; e < 4; ++e) s[t][e] =
        cap_score(a, s[t][e]);
  }
  if (!__all_sync(kAllLanes, whole)) {
    TM_UNROLL for (int t = 0; t < kTiles; ++t) TM_UNROLL for (int e = 0; e < 4; ++e) {
      const int key = first_key + t * 8 + lane_index() % 4 * 2 + e % 2;
      if (key < low[e / 2] || key >= high[e / 2]) s[t][e] = kNothing;
    }
  }
  TM_UNROLL for (int t = 0; t < kTiles; ++t) TM_UNROLL for (int e = 0; e < 4; ++e) top[e / 2] =
      max_number(top[e / 2], s[t][e]);
}

// The greatest (or the sum) over the four lanes that share a row.
TM_DEVICE float quad_max(float v) {
  v = max_number(v, __shfl_xor_sync(kAllLanes, v, 1));
  return max_number(v, __shfl_xor_sync(kAllLanes, v, 2));
}
TM_DEVICE float quad_sum(float v) {
  v += __shfl_xor_sync(kAllLanes, v, 1);
  return v + __shfl_xor_sync(kAllLanes, v, 2);
}

// Weights of a quarter of a split, 32 keys: 2^(factor * s - top), rounded to T as the second
// product's left side; the sums are of the rounded ones, over this lane's keys. top: scaled.
template <typename T>
TM_DEVICE void weigh_quarter(const float (*s)[4], float factor, const float (&top)[2],
                             uint32_t (*p)[4], float (&sum)[2]) {
  sum[0] = sum[1] = 0;
  const float down[2] = {top[0] == kNothing ? 0 : -top[0], top[1] == kNothing ? 0 : -top[1]};
  TM_UNROLL for (int t = 0; t < 4; ++t) TM_UNROLL for (int r = 0; r < 2; ++r) {
    const uint32_t both = pack2<T>(fast_exp2(fma(s[t][2 * r], factor, down[r])),
                                   fast_exp2(fma(s[t][2 * r + 1], factor, down[r])));
    p[t / 2][t % 2 * 2 + r] = both;
    const float2 w = unpack2<T>(both);
    sum[r] += w.x + w.y;
  }
}

// acc = p v for 16 columns of a slab, key pieces [from, to): two tiles of 8 columns.
template <typename T>
TM_DEVICE void multiply_values(float (&acc)[2][4], const uint32_t (&p)[kKeyPieces][4],
                               const uint8_t* v_slab, int column, int from, int to) {
  const int lane = lane_index();
  const uint8_t* v = v_slab + slab_offset(lane % 16, column / 8 + lane / 16);
  TM_UNROLL for (int i = 0; i < 2; ++i) TM_UNROLL for (int e = 0; e < 4; ++e) acc[i][e] = 0;
  if (from <= 0 && to >= kKeyPieces) {  // as in multiply_scores
    uint32_t b[2][4];
    ldmatrix_x4_trans(b[0], v);
    TM_UNROLL for (int j = 0; j < kKeyPieces; ++j) {
      if (j + 1 < kKeyPieces) ldmatrix_x4_trans(b[(j + 1) % 2], v + (j + 1) * 16 * kSlabRowBytes);
      multiply_pair<T>(acc, p[j], b[j % 2]);
    }
    return;
  }
  TM_UNROLL for (int j = 0; j < kKeyPieces; ++j) {
    if (j < from || j >= to) continue;
    uint32_t b[4];
    ldmatrix_x4_trans(b, v + j * 16 * kSlabRowBytes);
    multiply_pair<T>(acc, p[j], b);
  }
}

// A row's weights so far: their maximum's logarithm (base 2) and their sum relative to it.
struct RowState {
  float top = kNothing;
  float sum = 0;
};

struct MergeFactors {
  float keep = 1, add = 0;
  bool nothing = true;  // the other part saw no key: the row stays as it is, bit for bit
};

TM_DEVICE MergeFactors merge_rows(RowState& row, const RowState& other) {
  if (other.top == kNothing) return {1, 0, true};
  const float top = max_number(row.top, other.top);
  const MergeFactors f{fast_exp2(row.top - top), fast_exp2(other.top - top), false};
  row.top = top;
  row.sum = fma(other.sum, f.add, row.sum * f.keep);
  return f;
}
TM_DEVICE float merge_value(float value, float other, const MergeFactors& f) {
  return f.nothing ? value : fma(other, f.add, value * f.keep);
}

// Before any key: a sink is a key with this score and no value.
TM_DEVICE RowState first_state(const AttentionCudaArgs& a, int head) {
  RowState row;
  if (a.sinks) row = {load(a.sinks + head) * kLog2E, 1};
  return row;
}

// Partial results: outputs [row][slot][v_dim], then (top, sum) [row][slot].
struct Partials {
  float* values;
  float2* states;
  int slots, v_dim;

  TM_DEVICE float* value(int64_t row, int slot) const {
    return values + (row * slots + slot) * v_dim;
  }
  TM_DEVICE float2* state(int64_t row, int slot) const { return states + row * slots + slot; }
};
TM_DEVICE Partials partials_of(const AttentionCudaArgs& a, int64_t rows, int slots) {
  float* values = a.workspace;
  return {values, reinterpret_cast<float2*>(values + rows * slots * a.v_dim), slots, a.v_dim};
}

// Defined in attention_prefill_cuda.cu and attention_decode_cuda.cu.
void launch_chunks(StreamHandle stream, const AttentionLaunch& launch);
void launch_merge(StreamHandle stream, const AttentionLaunch& launch, bool chunks);

}  // namespace turbomind::TM_CUDA_NS
