#include "ops/attention.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "cpu/isa_dispatch.h"
#include "cuda/gpu_context.h"
#include "ops/attention_kernels.h"
#include "ops/dispatch.h"
#include "ops/kv_args_cuda.h"

namespace turbomind {

TM_KERNEL_TABLE(AttentionKernels, attention_kernels)

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

uint8_t* element(const Mat& m, int64_t row, int64_t col) {
  return static_cast<uint8_t*>(m.data) +
         static_cast<size_t>(row * m.stride + col) * dtype_bytes(m.dtype);
}

AttentionBlock describe(const AttentionShape& s, const KvLayout& l, const PageView& pages,
                        const Mat& q, const Mat& out) {
  AttentionBlock b{};
  b.group = s.heads / s.kv_heads;
  b.k_width = l.k_width();
  b.v_width = l.v_width();
  b.v_dim = s.v_dim;
  b.kv = l.dtype;
  b.bf16_out = out.dtype == DType::bf16;
  b.scale = s.scale;
  b.softcap = s.softcap;
  b.window = s.window;
  b.q_stride = q.stride;
  b.out_stride = out.stride;
  b.base = pages.base;
  b.page_bytes = pages.page_bytes;
  return b;
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
  a.scale = s.scale;
  a.softcap = s.softcap;
  a.window = s.window;
  a.sinks = s.sinks;
  launch.plan = plan_attention(a, *batch.bounds, gpu.limits());
  a.workspace = attention_workspace(gpu, launch.plan.workspace_bytes);
  attention(gpu.kind(), gpu.handle(), launch);
}

void on_cpu(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
            const PageView& pages, const SeqBatch& batch, const Mat& q, const Mat& out,
            AttentionScratch& scratch) {
  const AttentionSeq* seqs = batch.seqs;
  const int64_t num_seqs = batch.count;
  const AttentionKernels& kernels = attention_kernels(ctx.isa);
  const AttentionBlock common = describe(shape, layout, pages, q, out);

  const size_t floats = kernels.scratch_floats(layout.k_width(), layout.v_width());
  scratch.per_worker.resize(std::max<size_t>(scratch.per_worker.size(), ctx.pool.size()));
  for (auto& buffer : scratch.per_worker) {
    if (buffer.size() < floats) buffer.resize(floats);
  }

  const auto blocks_of = [&](const AttentionSeq& s) -> int64_t {
    return (std::max<int64_t>(s.q_len, 0) * common.group + kernels.m_block - 1) / kernels.m_block;
  };
  const auto attend = [&](const AttentionSeq& s, int head, int64_t block, int worker) {
    AttentionBlock b = common;
    const int64_t first_head = int64_t{head} * common.group;
    b.sinks = shape.sinks ? shape.sinks + first_head : nullptr;
    b.q = element(q, s.q_begin, first_head * common.k_width);
    b.out = element(out, s.q_begin, first_head * common.v_dim);
    b.pages = s.pages;
    b.k_offset = layout.k_offset(head);
    b.v_offset = layout.v_offset(head);
    b.kv_begin = s.kv_begin;
    b.m_begin = block * kernels.m_block;
    b.m_count =
        static_cast<int>(std::min<int64_t>(kernels.m_block, s.q_len * common.group - b.m_begin));
    kernels.attend(b, scratch.per_worker[worker].data());
  };

  int64_t total = 0;
  for (int64_t s = 0; s < num_seqs; ++s) total += blocks_of(seqs[s]) * shape.kv_heads;
  ctx.pool.parallel_for(total, 1, [&](int64_t begin, int64_t end, int worker) {
    int64_t s = 0, before = 0;  // blocks of the sequences before s
    for (int64_t i = begin; i < end; ++i) {
      while (i - before >= blocks_of(seqs[s]) * shape.kv_heads) {
        before += blocks_of(seqs[s++]) * shape.kv_heads;
      }
      // Late blocks see the most keys: they go first, so that the workers end together.
      const int64_t blocks = blocks_of(seqs[s]), at = i - before;
      attend(seqs[s], static_cast<int>(at / blocks), blocks - 1 - at % blocks, worker);
    }
  });

  const int64_t padded = std::min(padded_cols(out.cols), std::max(out.stride, out.cols));
  if (padded == out.cols) return;
  for (int64_t s = 0; s < num_seqs; ++s) {
    for (int64_t i = 0; i < seqs[s].q_len; ++i) {
      std::memset(element(out, seqs[s].q_begin + i, out.cols), 0,
                  static_cast<size_t>(padded - out.cols) * dtype_bytes(out.dtype));
    }
  }
}

}  // namespace

void attention(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
               const PageView& pages, const SeqBatch& batch, const Mat& q, const Mat& out,
               AttentionScratch& scratch) {
  check(ctx, shape, layout, q, out);
  const OpStat least = work(ctx.profiler, shape, layout, batch);
  ProfileScope scope(ctx.profiler, Op::attention, least.bytes, least.flops, ctx.profiler.device);
  dispatch(ctx, on_cpu, on_gpu, shape, layout, pages, batch, q, out, scratch);
}

}  // namespace turbomind
