#include "ops/rope_kv.h"

#include <algorithm>

#include "core/error.h"
#include "cpu/isa_dispatch.h"
#include "cuda/dispatch.h"
#include "cuda/gpu_context.h"
#include "ops/dispatch.h"
#include "ops/kv_args_cuda.h"
#include "ops/rope_kv_cuda.h"
#include "ops/rope_kv_kernels.h"

namespace turbomind {

TM_KERNEL_TABLE(RopeKvKernels, rope_kv_kernels)
TM_GPU_TABLE(RopeKvCuda, kRopeKvCuda, rope_kv_cuda)

namespace {

// Below this many elements a barrier costs more than the work it shares out.
constexpr int64_t kElementsPerTask = 16384;

constexpr OpTypes kKvTypes{"rope_write_kv", "KV", kHostKvTypes, kGpuKvTypes};
constexpr OpTypes kQkvTypes{"rope_write_kv", "qkv", {DType::f32}, {DType::f32}};

bool has_q_alone(const AttentionShape& s, const Mat& qkv) {
  return qkv.cols == int64_t{s.heads} * s.k_dim;
}

void check(const Context& ctx, const AttentionShape& s, const KvLayout& l, const Mat& qkv,
           const Mat& q, const HeadNorms& norms, const RopeTable* rope) {
  check_dtype(ctx, kKvTypes, l.dtype);
  check_dtype(ctx, kQkvTypes, qkv.dtype);
  if (l.kv_heads != s.kv_heads || l.k_dim != s.k_dim || l.v_dim != s.v_dim ||
      l.page_tokens != kPageTokens || l.k_width() > kMaxHeadWidth || l.v_width() > kMaxHeadWidth) {
    throw_error(ErrorCode::internal, "rope_write_kv: layout of ", l.kv_heads, " heads of ", l.k_dim,
                " and ", l.v_dim, ", ", l.page_tokens, " tokens a page; expected ", s.kv_heads,
                " heads of ", s.k_dim, " and ", s.v_dim, ", ", kPageTokens,
                " tokens a page, heads up to ", kMaxHeadWidth, " wide");
  }
  const int64_t cols = int64_t{s.heads + s.kv_heads} * s.k_dim + int64_t{s.kv_heads} * s.v_dim;
  if (qkv.cols != cols && !has_q_alone(s, qkv)) {
    throw_error(ErrorCode::internal, "rope_write_kv: qkv has ", qkv.cols, " columns, expected ",
                cols, ", or ", s.heads * s.k_dim, " of q alone");
  }
  if (q.dtype != attention_q_dtype(ctx, l.dtype) || q.cols != int64_t{s.heads} * l.k_width() ||
      q.rows != qkv.rows) {
    throw_error(ErrorCode::internal, "rope_write_kv: q is ", dtype_name(q.dtype), " [", q.rows,
                ", ", q.cols, "], expected ", dtype_name(attention_q_dtype(ctx, l.dtype)), " [",
                qkv.rows, ", ", int64_t{s.heads} * l.k_width(), "]");
  }
  if (norms.v.weight) {
    throw_error(ErrorCode::internal, "rope_write_kv: the norm of V has a weight, expected none");
  }
  if (rope && 2 * rope->inv_freq.size() > static_cast<size_t>(s.k_dim)) {
    throw_error(ErrorCode::internal, "rope_write_kv: rotated width ", 2 * rope->inv_freq.size(),
                " exceeds the head width ", s.k_dim);
  }
}

const float* norm_weight(const Norm& norm) {
  return norm.kind == NormKind::rms ? norm.weight : nullptr;
}

float v_eps(const HeadNorms& norms) {
  return norms.v.kind == NormKind::rms ? norms.v.eps : 0;
}

RopeKvHeads describe(const AttentionShape& s, const KvLayout& l, const Mat& q,
                     const HeadNorms& norms, const RopeTable* rope) {
  RopeKvHeads h{};
  h.heads = s.heads;
  h.kv_heads = s.kv_heads;
  h.k_dim = s.k_dim;
  h.v_dim = s.v_dim;
  h.k_width = l.k_width();
  h.v_width = l.v_width();
  h.kv = l.dtype;
  h.bf16_q = q.dtype == DType::bf16;
  h.q_weight = norm_weight(norms.q);
  h.k_weight = norm_weight(norms.k);
  h.q_offset = norms.q.weight_offset;
  h.k_offset = norms.k.weight_offset;
  h.q_eps = norms.q.eps;
  h.k_eps = norms.k.eps;
  h.v_eps = v_eps(norms);
  h.half = rope ? static_cast<int>(rope->inv_freq.size()) : 0;
  h.interleaved = rope && rope->interleaved;
  h.k_head_bytes = l.k_head_bytes();
  h.v_head_bytes = l.v_head_bytes();
  return h;
}

void on_gpu(GpuContext& gpu, const AttentionShape& s, const KvLayout& l, const PageView& pages,
            const SeqBatch& batch, const Mat& qkv, const HeadNorms& norms, const StepRope& rope,
            const Mat& q) {
  auto a = kv_args_cuda<RopeKvCudaArgs>(s, l, pages, batch);
  a.qkv = qkv.f32(0);
  a.q = q.data;
  a.q_weight = norm_weight(norms.q);
  a.k_weight = norm_weight(norms.k);
  a.q_offset = norms.q.weight_offset;
  a.k_offset = norms.k.weight_offset;
  a.q_eps = norms.q.eps;
  a.k_eps = norms.k.eps;
  a.v_eps = v_eps(norms);
  a.positions = rope.positions;
  a.inv_freq = rope.inv_freq;
  a.half = rope.table ? static_cast<int>(rope.table->inv_freq.size()) : 0;
  a.attention_factor = rope.table ? rope.table->attention_factor : 1;
  a.interleaved = rope.table && rope.table->interleaved;
  rope_write_kv(gpu.kind(), gpu.handle(), a, gpu.limits().multiprocessors);
}

// How many runs sequence s is cut into: at every kKvRun-th token of the sequence.
int64_t runs_of(const AttentionSeq& s) {
  if (s.q_len <= 0) return 0;
  return (s.kv_begin + s.q_len - 1) / kKvRun - s.kv_begin / kKvRun + 1;
}

void on_cpu(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
            const PageView& pages, const SeqBatch& batch, const Mat& qkv, const HeadNorms& norms,
            const StepRope& rope, const Mat& q) {
  const AttentionSeq* seqs = batch.seqs;
  const int64_t num_seqs = batch.count;
  const RopeKvHeads heads = describe(shape, layout, q, norms, rope.table);
  const RopeKvKernels& kernels = rope_kv_kernels(ctx.isa);

  const auto write_run = [&](const AttentionSeq& s, int64_t run) {
    const int64_t piece = (s.kv_begin / kKvRun + run) * kKvRun;  // token index the piece begins at
    const int64_t first = std::max(s.kv_begin, piece);
    const int64_t last = std::min(s.kv_begin + s.q_len, piece + kKvRun);
    const int64_t row = s.q_begin + first - s.kv_begin;
    uint8_t* page =
        pages.base + static_cast<size_t>(s.pages[first / kPageTokens]) * pages.page_bytes;
    RopeKvRun r{};
    r.qkv = qkv.f32(row);
    r.qkv_stride = qkv.stride;
    r.q = heads.bf16_q ? static_cast<void*>(q.u16(row)) : static_cast<void*>(q.f32(row));
    r.q_stride = q.stride;
    r.cos = heads.half ? rope.cos + row * heads.half : nullptr;
    r.sin = heads.half ? rope.sin + row * heads.half : nullptr;
    r.k_page = page + layout.k_offset(0);
    r.v_page = page + layout.v_offset(0);
    r.slot = static_cast<int>(first % kPageTokens);
    r.count = static_cast<int>(last - first);
    kernels.write(heads, r);
  };

  int64_t total = 0;
  for (int64_t s = 0; s < num_seqs; ++s) total += runs_of(seqs[s]);
  const int64_t grain = qkv.rows * qkv.cols < kElementsPerTask ? total : 1;
  ctx.pool.parallel_for(total, grain, [&](int64_t begin, int64_t end, int) {
    int64_t s = 0, before = 0;  // runs of the sequences before s
    for (int64_t i = begin; i < end; ++i) {
      while (i - before >= runs_of(seqs[s])) before += runs_of(seqs[s++]);
      write_run(seqs[s], i - before);
    }
  });
}

}  // namespace

void rope_write_kv(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
                   const PageView& pages, const SeqBatch& batch, const Mat& qkv,
                   const HeadNorms& norms, const StepRope& rope, const Mat& q) {
  check(ctx, shape, layout, qkv, q, norms, rope.table);
  const double elements = static_cast<double>(qkv.rows) * static_cast<double>(qkv.cols);
  ProfileScope scope(ctx.profiler, Op::rope_kv, elements * 6, elements * 4, ctx.profiler.device);
  AttentionShape written = shape;
  if (has_q_alone(shape, qkv)) written.kv_heads = 0;
  dispatch(ctx, on_cpu, on_gpu, written, layout, pages, batch, qkv, norms, rope, q);
}

DType attention_q_dtype(const Context& ctx, DType kv_dtype) {
  if (ctx.gpu) return kv_dtype;
  return kv_dtype == DType::bf16 && isa_has_bf16_dot(ctx.isa) ? DType::bf16 : DType::f32;
}

static void check_launch(const RopeKvCudaArgs& a) {
  const auto width = [](int dim) { return dim > 0 && dim % 8 == 0 && dim <= kMaxHeadDim; };
  if (!width(a.k_dim) || !width(a.v_dim) || (a.dtype != DType::bf16 && a.dtype != DType::f16) ||
      a.heads <= 0 || a.kv_heads < 0) {
    throw_error(ErrorCode::internal, "rope_write_kv: ", a.heads, " and ", a.kv_heads, " heads of ",
                a.k_dim, " and ", a.v_dim, " ", dtype_name(a.dtype),
                "; expected widths of multiples of 8 up to ", kMaxHeadDim, ", bfloat16 or float16");
  }
  if (a.half < 0 || 2 * a.half > a.k_dim) {
    throw_error(ErrorCode::internal, "rope_write_kv: rotated width ", 2 * a.half,
                " exceeds the head width ", a.k_dim);
  }
  if (a.pages.page_bytes % 16 || a.pages.k_offset % 16 || a.pages.v_offset % 16) {
    throw_error(ErrorCode::internal, "rope_write_kv: pages of ", a.pages.page_bytes,
                " bytes with K at ", a.pages.k_offset, " and V at ", a.pages.v_offset,
                "; expected multiples of 16");
  }
}

// A block takes 8 heads at a time; as many blocks as fill the device twice.
void rope_write_kv(GpuKind kind, StreamHandle stream, const RopeKvCudaArgs& args,
                   int multiprocessors) {
  check_launch(args);
  const int tokens = std::max(args.seqs.tokens, 1);
  const int items = args.heads + 2 * args.kv_heads;
  const int wanted = (2 * multiprocessors + tokens - 1) / tokens;
  rope_kv_cuda(kind).write(stream, {args, std::clamp(wanted, 1, (items + 7) / 8)});
}

}  // namespace turbomind
