// Attention of chunks: a block takes a tile of query rows of one sequence and kv head (a row is a
// query and one of the group's heads), 16 rows of it a warp, through the splits in its reach.
// Values wider than 128 columns are shared by two warps per 16 rows, who both compute the scores:
// one warp's registers do not hold more.
//
// Tiles are cut from the step's tokens, not from sequences: a block goes through the pieces of
// sequences among its tokens, and padding costs it nothing. Either it takes all splits and keeps
// what spans add up to in shared memory, or only one span, and the merge kernel takes the rest
// (few rows and a long past: 64 new tokens on 8k are 32 tiles, too few for the multiprocessors).
//
// Numbers of an H200 at 128 columns, bfloat16: 64 rows, 4 warps, shared memory 16 KiB queries +
// 64 KiB ring + 32 KiB totals, so 2 blocks per multiprocessor. A split is 256 mma of a warp against
// 128 ldmatrix; each byte of K and V serves 64 rows, 64 operations per byte, which makes L2
// (about 5.5 TB/s) the next limit at about 350 TFLOP/s.
#include "ops/attention_tile_cuda.h"

namespace turbomind::TM_CUDA_NS {

namespace {

constexpr int kMaxWarps = 4;
constexpr int kHalf = 128;  // most columns of V that a warp takes

// A piece of a sequence among a tile's tokens, and this lane's two rows of it.
struct Piece {
  int seq, token, rows;  // first token of the step; rows of the tile that count
  int first_position;    // of the first token
  int lo, hi;            // keys that any row sees
  HeadPart part;
  int warp, half;  // this warp's 16 rows and columns

  TM_DEVICE int position(int row) const { return first_position + row / part.heads; }
  TM_DEVICE int head(int row) const { return part.first_head + row % part.heads; }
  TM_DEVICE uint16_t* out_values(const AttentionCudaArgs& a, int row) const {
    return static_cast<uint16_t*>(a.out) + int64_t{token + row / part.heads} * a.out_stride +
           head(row) * a.v_dim;
  }
  TM_DEVICE int64_t out_row(int row, int heads) const {
    return int64_t{token + row / part.heads} * heads + head(row);
  }
};

template <int kSlabs>
struct TileState {
  RowState span[2], total[2];
  float o[kSlabs * 4][2][4] = {};  // of the span; [columns / 16]
};

// Splits of a piece that this block takes: all, or those of one span.
struct SplitRange {
  int first, last;
};

TM_DEVICE SplitRange split_range(const AttentionLaunch& w, const Piece& piece) {
  SplitRange r{piece.lo / kSplitTokens, (piece.hi - 1) / kSplitTokens};
  if (!w.plan.chunk_spans) return r;
  const int kv_begin = load(w.args.seqs.kv_begin + piece.seq);
  const int span = lowest_key(w.args, kv_begin) / kSpanTokens + static_cast<int>(blockIdx.z);
  return {max(r.first, span * kSpanSplits), min(r.last, span * kSpanSplits + kSpanSplits - 1)};
}

// Adds a span to the total, which waits in shared memory where it is neither the first nor the
// last: each thread's own values, [warp][value][lane].
template <int kSlabs>
TM_DEVICE void add_span(TileState<kSlabs>& t, float* totals, bool first, bool last) {
  MergeFactors f[2];
  for (int r = 0; r < 2; ++r) f[r] = merge_rows(t.total[r], t.span[r]);
  t.span[0] = t.span[1] = RowState{};
  float* mine = totals + warp_index() * kSlabs * 32 * kWarp + lane_index();
  TM_UNROLL for (int c = 0; c < kSlabs * 4; ++c) TM_UNROLL for (int i = 0; i < 8; ++i) {
    float* place = mine + (c * 8 + i) * kWarp;
    float& o = t.o[c][i / 4][i % 4];
    const float sum = merge_value(first ? 0.0f : *place, o, f[i % 4 / 2]);
    if (!last) *place = sum;
    o = last ? sum : 0.0f;
  }
}

// This lane's values of rows that count, two columns at a time.
template <int kSlabs, typename Store>
TM_DEVICE void for_each_pair(const TileState<kSlabs>& t, const Piece& piece, int v_dim,
                             const Store& each) {
  const int lane = lane_index();
  TM_UNROLL for (int r = 0; r < 2; ++r) {
    const int row = piece.warp * kTileRows + lane / 4 + 8 * r;
    if (row >= piece.rows) continue;
    TM_UNROLL for (int c = 0; c < kSlabs * 8; ++c) {
      const int column = piece.half * kHalf + c * 8 + lane % 4 * 2;
      if (column < v_dim)
        each(r, row, column, t.o[c / 2][c % 2][2 * r], t.o[c / 2][c % 2][2 * r + 1]);
    }
  }
}

template <int kSlabs>
TM_DEVICE void store_span(const AttentionLaunch& w, const TileState<kSlabs>& t,
                          const Piece& piece) {
  const AttentionCudaArgs& a = w.args;
  const Partials partials = partials_of(a, int64_t{a.seqs.tokens} * a.heads, w.plan.chunk_slots);
  const int slot = blockIdx.z;
  for_each_pair(t, piece, a.v_dim, [&](int r, int row, int column, float x, float y) {
    const int64_t at = piece.out_row(row, a.heads);
    store(reinterpret_cast<float2*>(partials.value(at, slot) + column), make_float2(x, y));
    if (column == 0) store(partials.state(at, slot), make_float2(t.span[r].top, t.span[r].sum));
  });
}

template <typename T, int kSlabs>
TM_DEVICE void store_out(const AttentionCudaArgs& a, const TileState<kSlabs>& t,
                         const Piece& piece) {
  const float scale[2] = {1.0f / t.total[0].sum, 1.0f / t.total[1].sum};
  for_each_pair(t, piece, a.v_dim, [&](int r, int row, int column, float x, float y) {
    store(reinterpret_cast<uint32_t*>(piece.out_values(a, row) + column),
          pack2<T>(x * scale[r], y * scale[r]));
  });
}

// The padding of the piece's `count` rows of `out`, by the blocks that have the last head.
TM_DEVICE void zero_padding(const AttentionCudaArgs& a, const Piece& piece, int count) {
  const int words = (a.out_zero_end - a.heads * a.v_dim) / 2;
  if (words <= 0 || piece.part.first_head + piece.part.heads < a.heads) return;
  TM_ROLLED for (int i = threadIdx.x; i < count * words; i += blockDim.x) {
    uint16_t* row = static_cast<uint16_t*>(a.out) + int64_t{piece.token + i / words} * a.out_stride;
    store(reinterpret_cast<uint32_t*>(row + a.heads * a.v_dim) + i % words, 0u);
  }
}

// The ring: before a slab is used, the one that takes the place of the slab before it is called
// for.
struct Ring {
  uint8_t* slabs;
  int stages, stage;

  TM_DEVICE const uint8_t* next(SlabLoader& loader) {
    if (stages == 4)
      copy_async_wait<2>();
    else
      copy_async_wait<1>();
    __syncthreads();
    const int before = stage == 0 ? stages - 1 : stage - 1;
    loader.issue(slabs + before * kSlabBytes);
    copy_async_commit();
    __syncwarp();  // lanes copied different rows; the products want them together
    const uint8_t* slab = slabs + stage * kSlabBytes;
    stage = stage + 1 == stages ? 0 : stage + 1;
    return slab;
  }
};

template <typename T>
TM_DEVICE void tile_weights(const AttentionCudaArgs& a, float (*s)[4], int first_key,
                            const int (&positions)[2], uint32_t (&p)[kKeyPieces][4],
                            RowState (&fresh)[2]) {
  int low[2], high[2];
  for (int r = 0; r < 2; ++r) {
    high[r] = positions[r] + 1 - first_key;
    low[r] = lowest_key(a, positions[r]) - first_key;
  }
  float top[2] = {kNothing, kNothing}, sum[2] = {0, 0};
  TM_UNROLL for (int i = 0; i < 4; ++i) mask_scores<4>(a, s + 4 * i, i * 32, low, high, top);
  const float factor = score_factor(a);
  top[0] = quad_max(top[0]) * factor;
  top[1] = quad_max(top[1]) * factor;
  TM_UNROLL for (int i = 0; i < 4; ++i) {
    float quarter[2];
    weigh_quarter<T>(s + 4 * i, factor, top, p + 2 * i, quarter);
    for (int r = 0; r < 2; ++r) sum[r] = i == 0 ? quarter[r] : sum[r] + quarter[r];
  }
  for (int r = 0; r < 2; ++r) fresh[r] = {top[r], quad_sum(sum[r])};
}

// One slab's columns of a split, merged into o [columns / 16].
template <typename T>
TM_DEVICE void add_values(float (*o)[2][4], const uint8_t* slab, int columns,
                          const uint32_t (&p)[kKeyPieces][4], int from, int to,
                          const MergeFactors (&merge)[2]) {
  TM_UNROLL for (int u = 0; u < kSlabDims / 16; ++u) {
    if (u * 16 >= columns) break;
    float acc[2][4];
    multiply_values<T>(acc, p, slab, u * 16, from, to);
    TM_UNROLL for (int i = 0; i < 2; ++i) TM_UNROLL for (int e = 0; e < 4; ++e) o[u][i][e] =
        merge_value(o[u][i][e], acc[i][e], merge[e / 2]);
  }
}

template <typename T, int kSlabs>
TM_DEVICE void attend_piece(const AttentionLaunch& w, const Piece& piece) {
  const AttentionCudaArgs& a = w.args;
  const SplitRange range = split_range(w, piece);
  if (range.first > range.last) return;
  const int warp = piece.warp, tile_rows = w.plan.tile_warps * kTileRows;
  const int k_slabs = slabs_of(a.k_dim), halves = w.plan.column_halves;
  Ring ring{shared_memory<uint8_t>(), w.plan.chunk_stages, 0};
  uint8_t* q = ring.slabs + ring.stages * kSlabBytes;
  float* totals = reinterpret_cast<float*>(q + k_slabs * tile_rows * kSlabRowBytes);

  SlabLoader loader{a,
                    {range.last, 1, false},
                    a.seqs.pages + int64_t{piece.seq} * a.seqs.max_pages,
                    piece.part.kv_head,
                    piece.lo,
                    piece.hi};
  loader.start(range.first);
  copy_queries(a, piece.part, piece.token, piece.rows, tile_rows, q);
  TM_ROLLED for (int i = 0; i < ring.stages - 1; ++i) {
    loader.issue(ring.slabs + i * kSlabBytes);
    copy_async_commit();
  }

  // Rows after the last one repeat it; their results are not stored.
  const int first_row = min(warp * kTileRows, piece.rows - 1);
  const int last_row = min(warp * kTileRows + kTileRows - 1, piece.rows - 1);
  const bool idle = warp * kTileRows >= piece.rows;
  const int lane_row = warp * kTileRows + lane_index() / 4;
  const int rows[2] = {min(lane_row, piece.rows - 1), min(lane_row + 8, piece.rows - 1)};
  const int positions[2] = {piece.position(rows[0]), piece.position(rows[1])};
  const int warp_lo = lowest_key(a, piece.position(first_row));
  const int warp_hi = piece.position(last_row) + 1;

  TileState<kSlabs> t;
  for (int r = 0; r < 2; ++r) t.total[r] = first_state(a, piece.head(rows[r]));
  bool first_span = true;
  TM_ROLLED for (int split = range.first; split <= range.last; ++split) {
    const int first_key = split * kSplitTokens;
    const int from = max(warp_lo - first_key, 0) / 16;
    const int to = idle ? 0 : (min(warp_hi - first_key, kSplitTokens) + 15) / 16;
    float s[kKeyPieces * 2][4] = {};
    TM_ROLLED for (int c = 0; c < k_slabs; ++c) {
      const uint8_t* slab = ring.next(loader);
      multiply_scores<T, kKeyPieces>(s, q + (c * tile_rows + warp * kTileRows) * kSlabRowBytes,
                                     slab, 0, from, to, a.k_dim - c * kSlabDims);
    }
    uint32_t p[kKeyPieces][4];
    RowState fresh[2];
    tile_weights<T>(a, s, first_key, positions, p, fresh);
    MergeFactors merge[2];
    for (int r = 0; r < 2; ++r) merge[r] = merge_rows(t.span[r], fresh[r]);
    TM_ROLLED for (int half = 0; half < halves; ++half) {
      TM_UNROLL for (int c = 0; c < kSlabs; ++c) {
        const int column = half * kHalf + c * kSlabDims;
        if (column >= a.v_dim) break;
        const uint8_t* slab = ring.next(loader);
        if (half == piece.half)
          add_values<T>(t.o + c * 4, slab, a.v_dim - column, p, from, to, merge);
      }
    }
    if (w.plan.chunk_spans || !loader.order.ends_span(split)) continue;
    add_span(t, totals, first_span, split == range.last);
    first_span = false;
  }
  if (w.plan.chunk_spans)
    store_span(w, t, piece);
  else
    store_out<T>(a, t, piece);
}

}  // namespace

template <typename T, int kSlabs>
TM_KERNEL(kMaxWarps* kWarp, 2)
void attend_tiles(const TM_GRID_CONSTANT AttentionLaunch w) {
  let_next_start();
  wait_for_previous();
  const SeqArrays& seqs = w.args.seqs;
  const int tokens = w.plan.tile_tokens;
  // The last tiles see the most keys: they begin first.
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * tokens;
  const int end = min(first + tokens, seqs.tokens);
  for (int token = first; token < end;) {
    Piece piece;
    piece.seq = load(seqs.seq_of_token + token);
    const int q_len = piece.seq < 0 ? 0 : load(seqs.q_len + piece.seq);
    if (q_len <= 1) {
      ++token;
      continue;
    }
    const int q_begin = load(seqs.q_begin + piece.seq);
    const int count = min(end, q_begin + q_len) - token;
    piece.part = head_part(w, blockIdx.y);
    piece.token = token;
    piece.rows = count * piece.part.heads;
    piece.first_position = load(seqs.kv_begin + piece.seq) + token - q_begin;
    piece.lo = lowest_key(w.args, piece.first_position);
    piece.hi = piece.first_position + count;
    piece.warp = warp_index() % w.plan.tile_warps;
    piece.half = warp_index() / w.plan.tile_warps;
    if (!w.plan.chunk_spans) zero_padding(w.args, piece, count);
    attend_piece<T, kSlabs>(w, piece);
    __syncthreads();  // the ring and the queries are used again
    token += count;
  }
}

namespace {

template <typename T>
void launch_tiles(StreamHandle stream, const AttentionLaunch& launch) {
  const AttentionPlan& plan = launch.plan;
  const dim3 grid((launch.args.seqs.tokens + plan.tile_tokens - 1) / plan.tile_tokens,
                  launch.args.kv_heads * plan.parts, plan.chunk_spans ? plan.chunk_slots : 1);
  const int threads = plan.tile_warps * plan.column_halves * kWarp;
  const size_t shared = plan.chunk_shared_bytes;
  if (launch.args.v_dim <= kSlabDims)
    TM_CUDA_NS::launch<attend_tiles<T, 1>>(stream, grid, threads, shared, launch);
  else
    TM_CUDA_NS::launch<attend_tiles<T, 2>>(stream, grid, threads, shared, launch);
}

}  // namespace

void launch_chunks(StreamHandle stream, const AttentionLaunch& launch) {
  if (launch.args.dtype == DType::bf16)
    launch_tiles<Bf16>(stream, launch);
  else
    launch_tiles<F16>(stream, launch);
  if (launch.plan.chunk_spans) launch_merge(stream, launch, true);
}

}  // namespace turbomind::TM_CUDA_NS
