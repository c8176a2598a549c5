// Attention of sequences with one query: every block takes some splits of one sequence and kv head,
// a second kernel merges what they found.
//
// A block has one tile of 16 rows (the query heads of the group). Its 4 warps share a split's
// scores by keys (32 each), exchange maxima and weights through shared memory, and share the second
// product by columns (16 of each slab), so no output is summed across warps.
//
// Numbers of an H200 at 128 columns, bfloat16, group 4: a split is 64 KiB of K and V in four slabs,
// all on their way before the first is used; shared memory 74 KiB, so 3 blocks per multiprocessor
// keep up to 192 KiB in flight where about 33 KiB (4.3 TB/s over 132 multiprocessors, 1 us) would
// do; the arithmetic of a split is 64 mma and 64 ldmatrix of a warp. Partial results are 2 KiB per
// split (3 %, written and read), or a span.
#include "ops/attention_tile_cuda.h"

namespace turbomind::TM_CUDA_NS {

namespace {

constexpr int kStages = 4;
constexpr int kWarps = 4;

// Shared memory after the ring; queries follow.
struct Exchange {
  uint4 weights[kKeyPieces][kWarp];  // as the lanes of every warp take them
  float2 tops[kWarps][kWarp];
  float2 sums[kWarps][kWarp];
};
static_assert(sizeof(Exchange) == 6 << 10 && kSlabBytes == 16 << 10);  // plan_attention makes room

TM_DEVICE int wrap(int stage) {
  return stage % kStages;
}

// Rows of a partial result that this lane has, 16 columns of a warp.
template <typename Value>
TM_DEVICE void store_partial(const Partials& partials, int64_t row, int slot, int heads, int column,
                             const Value (&o)[2][4]) {
  const int lane = lane_index();
  TM_UNROLL for (int i = 0; i < 2; ++i) TM_UNROLL for (int r = 0; r < 2; ++r) {
    const int head = lane / 4 + 8 * r, at = column + i * 8 + lane % 4 * 2;
    if (head < heads && at < partials.v_dim)
      store(reinterpret_cast<float2*>(partials.value(row + head, slot) + at),
            make_float2(o[i][2 * r], o[i][2 * r + 1]));
  }
}

TM_DEVICE void store_states(const Partials& partials, int64_t row, int slot, int heads,
                            const RowState (&states)[2]) {
  const int lane = lane_index();
  if (warp_index() != 0 || lane % 4 != 0) return;
  for (int r = 0; r < 2; ++r)
    if (lane / 4 + 8 * r < heads)
      store(partials.state(row + lane / 4 + 8 * r, slot),
            make_float2(states[r].top, states[r].sum));
}

// Turns a warp's scores of 32 keys into all weights of the split and its state.
template <typename T>
TM_DEVICE void exchange_weights(const AttentionCudaArgs& a, Exchange& e, float (*s)[4], int begin,
                                int end, uint32_t (&p)[kKeyPieces][4], RowState (&split)[2]) {
  const int lane = lane_index(), warp = warp_index();
  const int low[2] = {begin, begin}, high[2] = {end, end};
  float top[2] = {kNothing, kNothing};
  mask_scores<4>(a, s, warp * 32, low, high, top);
  e.tops[warp][lane] = make_float2(top[0], top[1]);
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) {
    top[0] = max_number(top[0], e.tops[w][lane].x);
    top[1] = max_number(top[1], e.tops[w][lane].y);
  }
  const float factor = score_factor(a);
  top[0] = quad_max(top[0]) * factor;
  top[1] = quad_max(top[1]) * factor;
  uint32_t mine[2][4];
  float sum[2];
  weigh_quarter<T>(s, factor, top, mine, sum);
  for (int j = 0; j < 2; ++j)
    e.weights[warp * 2 + j][lane] = make_uint4(mine[j][0], mine[j][1], mine[j][2], mine[j][3]);
  e.sums[warp][lane] = make_float2(sum[0], sum[1]);
  __syncthreads();
  TM_UNROLL for (int j = 0; j < kKeyPieces; ++j) {
    const uint4 all = e.weights[j][lane];
    p[j][0] = all.x, p[j][1] = all.y, p[j][2] = all.z, p[j][3] = all.w;
  }
  float2 total = e.sums[0][lane];
  for (int w = 1; w < kWarps; ++w) {
    total.x += e.sums[w][lane].x;
    total.y += e.sums[w][lane].y;
  }
  split[0] = {top[0], quad_sum(total.x)};
  split[1] = {top[1], quad_sum(total.y)};
}

}  // namespace

template <typename T>
TM_KERNEL(kWarps* kWarp, 3)
void attend_decode(const TM_GRID_CONSTANT AttentionLaunch w) {
  let_next_start();
  const AttentionCudaArgs& a = w.args;
  const int seq = blockIdx.y, q_len = load_constant(a.seqs.q_len + seq);
  const int position = load_constant(a.seqs.kv_begin + seq);
  const int token = load_constant(a.seqs.q_begin + seq);
  if (q_len != 1) return wait_for_previous();
  const int lo = lowest_key(a, position);
  const bool spans = w.plan.decode_spans;
  const int first_split = lo / kSplitTokens, first_span = lo / kSpanTokens;
  const SplitOrder order{position / kSplitTokens, w.plan.decode_blocks, spans};
  const int z = blockIdx.z;
  const int first = spans ? max(first_split, (first_span + z) * kSpanSplits) : first_split + z;
  if (first > order.last) return wait_for_previous();

  uint8_t* ring = shared_memory<uint8_t>();
  Exchange& exchange = *reinterpret_cast<Exchange*>(ring + w.plan.decode_stages * kSlabBytes);
  uint8_t* q = reinterpret_cast<uint8_t*>(&exchange + 1);
  const HeadPart part = head_part(w, blockIdx.x);
  SlabLoader loader{a,  order,       a.seqs.pages + int64_t{seq} * a.seqs.max_pages, part.kv_head,
                    lo, position + 1};
  loader.start(first);
  wait_for_previous();  // where the keys are did not depend on it
  copy_queries(a, part, token, part.heads, kTileRows, q);
  TM_ROLLED for (int i = 0; i < kStages; ++i) {
    loader.issue(ring + i * kSlabBytes);
    copy_async_commit();
  }

  const int warp = warp_index(), k_slabs = slabs_of(a.k_dim);
  const Partials partials = partials_of(a, int64_t{a.seqs.num_seqs} * a.heads, w.plan.decode_slots);
  const int64_t row = int64_t{seq} * a.heads + part.first_head;
  RowState span[2];
  float o[kMaxSlabs][2][4] = {};
  int stage = 0;
  TM_ROLLED for (int split = first; split <= order.last; split = order.next(split)) {
    const int first_key = split * kSplitTokens;
    const int begin = max(lo - first_key, 0), end = min(position + 1 - first_key, kSplitTokens);
    const int from = begin / 16, to = (end + 15) / 16;
    float s[4][4] = {};
    TM_ROLLED for (int c = 0; c < k_slabs; ++c, stage = wrap(stage + 1)) {
      copy_async_wait<kStages - 1>();
      __syncthreads();
      multiply_scores<T, 2>(s, q + c * kTileRows * kSlabRowBytes, ring + stage * kSlabBytes,
                            warp * 2, from - warp * 2, to - warp * 2, a.k_dim - c * kSlabDims);
      __syncthreads();
      loader.issue(ring + stage * kSlabBytes);
      copy_async_commit();
    }
    uint32_t p[kKeyPieces][4];
    RowState fresh[2];
    exchange_weights<T>(a, exchange, s, begin, end, p, fresh);
    MergeFactors merge[2];
    if (spans)
      for (int r = 0; r < 2; ++r) merge[r] = merge_rows(span[r], fresh[r]);
    TM_UNROLL for (int c = 0; c < kMaxSlabs; ++c) {
      const int column = c * kSlabDims + warp * 16;
      if (c * kSlabDims >= a.v_dim) break;
      copy_async_wait<kStages - 1>();
      __syncthreads();
      if (column < a.v_dim) {
        float acc[2][4];
        multiply_values<T>(acc, p, ring + stage * kSlabBytes, warp * 16, from, to);
        if (!spans) store_partial(partials, row, split - first_split, part.heads, column, acc);
        TM_UNROLL for (int i = 0; spans && i < 2; ++i) TM_UNROLL for (int e = 0; e < 4; ++e)
            o[c][i][e] = merge_value(o[c][i][e], acc[i][e], merge[e / 2]);
      }
      __syncthreads();
      loader.issue(ring + stage * kSlabBytes);
      copy_async_commit();
      stage = wrap(stage + 1);
    }
    if (!spans) {
      store_states(partials, row, split - first_split, part.heads, fresh);
      continue;
    }
    if (!order.ends_span(split)) continue;
    const int slot = split / kSpanSplits - first_span;
    TM_UNROLL for (int c = 0; c < kMaxSlabs; ++c) {
      store_partial(partials, row, slot, part.heads, c * kSlabDims + warp * 16, o[c]);
      TM_UNROLL for (int i = 0; i < 2; ++i) TM_UNROLL for (int e = 0; e < 4; ++e) o[c][i][e] = 0;
    }
    store_states(partials, row, slot, part.heads, span);
    span[0] = span[1] = RowState{};
  }
}

namespace {

struct MergeLaunch {
  AttentionLaunch w;
  bool chunks;  // a block per head and token of the chunks, else per head and sequence
};

// One span of a row as one warp has it: lane l has columns 4 l + 0..3 and 128 more.
struct SpanPart {
  alignas(16) float values[kMaxHeadDim];
  RowState state;
};

TM_DEVICE float4 merge_four(float4 a, float4 b, const MergeFactors& f) {
  return make_float4(merge_value(a.x, b.x, f), merge_value(a.y, b.y, f), merge_value(a.z, b.z, f),
                     merge_value(a.w, b.w, f));
}

// Slots [begin, end) of a row, at most 8 splits in order, merged; a span's own slot is copied.
TM_DEVICE void merge_span(const Partials& partials, int64_t row, int begin, int end, bool copy,
                          SpanPart& part) {
  RowState state;
  MergeFactors f[kSpanSplits];
  float2 states[kSpanSplits];
  const int count = end - begin;
  TM_UNROLL for (int i = 0; i < kSpanSplits; ++i) states[i] =
      i < count ? load(partials.state(row, begin + i)) : make_float2(kNothing, 0);
  TM_UNROLL for (int i = 0; i < kSpanSplits; ++i) f[i] =
      merge_rows(state, {states[i].x, states[i].y});
  for (int at = lane_index() * 4; at < partials.v_dim; at += 4 * kWarp) {
    float4 o = make_float4(0, 0, 0, 0), x[kSpanSplits];
    TM_UNROLL for (int i = 0; i < kSpanSplits; ++i) x[i] =
        i < count ? load(reinterpret_cast<const float4*>(partials.value(row, begin + i) + at)) : o;
    TM_UNROLL for (int i = 0; i < kSpanSplits; ++i) o =
        copy ? (i == 0 ? x[0] : o) : merge_four(o, x[i], f[i]);
    *reinterpret_cast<float4*>(part.values + at) = o;
  }
  if (lane_index() == 0) part.state = copy ? RowState{states[0].x, states[0].y} : state;
}

}  // namespace

template <typename T>
TM_KERNEL(kWarps* kWarp, 4)
void merge_attention(const TM_GRID_CONSTANT MergeLaunch m) {
  let_next_start();
  const AttentionCudaArgs& a = m.w.args;
  const int head = blockIdx.x, index = blockIdx.y;
  const int seq = m.chunks ? load_constant(a.seqs.seq_of_token + index) : index;
  if (seq < 0) return wait_for_previous();
  const int q_len = load_constant(a.seqs.q_len + seq);
  if (m.chunks ? q_len <= 1 : q_len != 1) return wait_for_previous();
  const int kv_begin = load_constant(a.seqs.kv_begin + seq);
  const int q_begin = load_constant(a.seqs.q_begin + seq);
  const int token = m.chunks ? index : q_begin, position = kv_begin + token - q_begin;
  const bool spans = m.chunks || m.w.plan.decode_spans;
  const int unit = spans ? kSpanTokens : kSplitTokens;  // tokens of a slot
  const int first = lowest_key(a, position) / unit, last = position / unit;
  const int slot0 = lowest_key(a, kv_begin) / unit;
  const int64_t all_rows = int64_t{m.chunks ? a.seqs.tokens : a.seqs.num_seqs} * a.heads;
  const Partials partials =
      partials_of(a, all_rows, m.chunks ? m.w.plan.chunk_slots : m.w.plan.decode_slots);
  const int64_t row = int64_t{index} * a.heads + head;

  wait_for_previous();
  SpanPart* parts = shared_memory<SpanPart>();
  RowState total = first_state(a, head);
  float o[2] = {};
  const int column = static_cast<int>(threadIdx.x) * 2, per_span = kSpanTokens / unit;
  for (int span0 = first / per_span; span0 <= last / per_span; span0 += kWarps) {
    const int span = span0 + warp_index();
    if (span <= last / per_span)
      merge_span(partials, row, max(first, span * per_span) - slot0,
                 min(last + 1, (span + 1) * per_span) - slot0, spans, parts[warp_index()]);
    __syncthreads();
    for (int i = 0; i < kWarps && span0 + i <= last / per_span; ++i) {
      const MergeFactors f = merge_rows(total, parts[i].state);
      if (column >= a.v_dim) continue;
      for (int c = 0; c < 2; ++c) o[c] = merge_value(o[c], parts[i].values[column + c], f);
    }
    __syncthreads();
  }
  uint16_t* out = static_cast<uint16_t*>(a.out) + int64_t{token} * a.out_stride + head * a.v_dim;
  if (head == a.heads - 1 && a.heads * a.v_dim + column < a.out_zero_end)
    store(reinterpret_cast<uint32_t*>(out + a.v_dim + column), 0u);
  if (column >= a.v_dim) return;
  const float scale = 1.0f / total.sum;
  store(reinterpret_cast<uint32_t*>(out + column), pack2<T>(o[0] * scale, o[1] * scale));
}

void launch_merge(StreamHandle stream, const AttentionLaunch& launch, bool chunks) {
  const MergeLaunch m{launch, chunks};
  const dim3 grid(launch.args.heads, chunks ? launch.args.seqs.tokens : launch.args.seqs.num_seqs);
  const size_t shared = kWarps * sizeof(SpanPart);
  if (launch.args.dtype == DType::bf16)
    TM_CUDA_NS::launch<merge_attention<Bf16>>(stream, grid, kWarps * kWarp, shared, m);
  else
    TM_CUDA_NS::launch<merge_attention<F16>>(stream, grid, kWarps * kWarp, shared, m);
}

namespace {

void launch_decode(StreamHandle stream, const AttentionLaunch& launch) {
  const dim3 grid(launch.args.kv_heads * launch.plan.parts, launch.args.seqs.num_seqs,
                  launch.plan.decode_blocks);
  const size_t shared = launch.plan.decode_shared_bytes;
  if (launch.args.dtype == DType::bf16)
    TM_CUDA_NS::launch<attend_decode<Bf16>>(stream, grid, kWarps * kWarp, shared, launch);
  else
    TM_CUDA_NS::launch<attend_decode<F16>>(stream, grid, kWarps * kWarp, shared, launch);
  launch_merge(stream, launch, false);
}

void attend(StreamHandle stream, const AttentionLaunch& launch) {
  if (launch.plan.decode) launch_decode(stream, launch);
  if (launch.plan.chunks) launch_chunks(stream, launch);
}

}  // namespace

extern const AttentionCuda kAttentionCuda;
const AttentionCuda kAttentionCuda{attend};

}  // namespace turbomind::TM_CUDA_NS
