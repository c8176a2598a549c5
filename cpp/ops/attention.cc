#include "ops/attention.h"

#include <algorithm>

#include "core/error.h"
#include "cuda/gpu_context.h"
#include "ops/attention_host.h"
#include "ops/dispatch.h"
#include "ops/kv_args_cuda.h"

namespace turbomind {

namespace {

constexpr OpTypes kKvTypes{"attention", "KV", kHostKvTypes, kGpuKvTypes};
constexpr OpTypes kOutTypes{
    "attention", "out", {DType::f32, DType::bf16}, {DType::f16, DType::bf16}};

void check(const Context& ctx, const AttentionShape& s, const KvLayout& l, const Mat& q,
           const Mat& out) {
  if (s.kv_heads <= 0 || s.heads <= 0 || s.heads % s.kv_heads != 0 || !(s.scale > 0)) {
    throw_error(ErrorCode::internal, "attention: ", s.heads, " heads over ", s.kv_heads,
                " kv heads with scale ", s.scale,
                "; expected a multiple of the kv heads and a positive scale");
  }
  check_dtype(ctx, kKvTypes, l.dtype);
  check_dtype(ctx, kOutTypes, out.dtype);
  if (l.kv_heads != s.kv_heads || l.k_dim != s.k_dim || l.v_dim != s.v_dim ||
      l.page_tokens != kPageTokens) {
    throw_error(ErrorCode::internal, "attention: layout of ", l.kv_heads, " heads of ", l.k_dim,
                " and ", l.v_dim, ", ", l.page_tokens, " tokens a page; expected ", s.kv_heads,
                " heads of ", s.k_dim, " and ", s.v_dim, ", ", kPageTokens, " tokens a page");
  }
  if (q.dtype != attention_q_dtype(ctx, l.dtype) || q.cols != int64_t{s.heads} * l.k_width()) {
    throw_error(ErrorCode::internal, "attention: q is ", dtype_name(q.dtype), " with ", q.cols,
                " columns, expected ", dtype_name(attention_q_dtype(ctx, l.dtype)), " with ",
                int64_t{s.heads} * l.k_width());
  }
  if ((ctx.gpu && out.dtype != l.dtype) || out.cols != int64_t{s.heads} * s.v_dim ||
      out.rows != q.rows) {
    throw_error(ErrorCode::internal, "attention: out is ", dtype_name(out.dtype), " [", out.rows,
                ", ", out.cols, "], expected ",
                ctx.gpu ? dtype_name(l.dtype) : dtype_name(out.dtype), " [", q.rows, ", ",
                int64_t{s.heads} * s.v_dim, "]");
  }
}

// Keys that the queries of a sequence see, summed over queries; and keys that any of them sees.
struct Visible {
  double pairs = 0, keys = 0;
};

Visible visible(const AttentionSeq& s, int window) {
  Visible v;
  for (int64_t i = 0; i < s.q_len; ++i) {
    const int64_t seen = s.kv_begin + i + 1;
    v.pairs += static_cast<double>(window ? std::min<int64_t>(seen, window) : seen);
  }
  const int64_t end = s.kv_begin + s.q_len;
  v.keys = static_cast<double>(window ? std::min<int64_t>(end, s.q_len + window - 1) : end);
  return v;
}

// The op's least work: what the profile compares its time with.
OpStat work(const Profiler& profiler, const AttentionShape& s, const KvLayout& l,
            const SeqBatch& batch) {
  OpStat stat;
  if (!profiler.enabled || !batch.seqs) return stat;
  const double width = s.k_dim + s.v_dim;
  for (int64_t i = 0; i < batch.count; ++i) {
    if (batch.seqs[i].q_len <= 0) continue;
    const Visible v = visible(batch.seqs[i], s.window);
    stat.flops += 2 * v.pairs * width * s.heads;
    stat.bytes += v.keys * width * s.kv_heads * static_cast<double>(dtype_bytes(l.dtype));
  }
  return stat;
}

void on_gpu(GpuContext& gpu, const AttentionShape& s, const KvLayout& l, const PageView& pages,
            const SeqBatch& batch, const Mat& q, const Mat& out, AttentionScratch&) {
  AttentionLaunch launch{};
  AttentionCudaArgs& a = launch.args;
  a = kv_args_cuda<AttentionCudaArgs>(s, l, pages, batch);
  a.q = q.data;
  a.out = out.data;
  a.out_stride = static_cast<int>(out.stride);
  a.out_zero_end = static_cast<int>(std::min(padded_cols(out.cols), out.stride));
  a.scale = s.scale;
  a.softcap = s.softcap;
  a.window = s.window;
  a.sinks = s.sinks;
  launch.plan = plan_attention(a, *batch.bounds, gpu.limits());
  a.workspace = attention_workspace(gpu, launch.plan.workspace_bytes);
  attention(gpu.kind(), gpu.handle(), launch);
}

}  // namespace

void attention(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
               const PageView& pages, const SeqBatch& batch, const Mat& q, const Mat& out,
               AttentionScratch& scratch) {
  check(ctx, shape, layout, q, out);
  const OpStat least = work(ctx.profiler, shape, layout, batch);
  ProfileScope scope(ctx.profiler, Op::attention, least.bytes, least.flops, ctx.profiler.device);
  dispatch(ctx, attention_on_host, on_gpu, shape, layout, pages, batch, q, out, scratch);
}

}  // namespace turbomind
