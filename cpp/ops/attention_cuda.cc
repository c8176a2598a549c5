#include "ops/attention_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "cuda/dispatch.h"
#include "cuda/gpu_context.h"

namespace turbomind {

TM_GPU_TABLE(AttentionCuda, kAttentionCuda, attention_cuda)

namespace {

constexpr size_t kSlabBytes = 16 << 10;  // of a stage of the ring
constexpr int kStages = 4;
constexpr size_t kReservedShared = 1 << 10;       // of every block, by the device
constexpr size_t kExchangeBytes = 6 << 10;        // of a decode block
constexpr size_t kMostPartialBytes = 256u << 20;  // most that chunks may take for partial results

int64_t ceil_div(int64_t n, int64_t d) {
  return (n + d - 1) / d;
}

void check(const AttentionCudaArgs& a, const AttentionBounds& b, const GpuLimits& limits) {
  const auto width = [](int dim) { return dim > 0 && dim % 8 == 0 && dim <= kMaxHeadDim; };
  if (a.kv_heads <= 0 || a.heads <= 0 || a.heads % a.kv_heads != 0 || !(a.scale > 0) ||
      a.window < 0) {
    throw_error(ErrorCode::internal, "attention: ", a.heads, " heads over ", a.kv_heads,
                " kv heads with scale ", a.scale, " and window ", a.window,
                "; expected a multiple of the kv heads, a positive scale and no negative window");
  }
  if (!width(a.k_dim) || !width(a.v_dim) || (a.dtype != DType::bf16 && a.dtype != DType::f16)) {
    throw_error(ErrorCode::internal, "attention: heads of ", a.k_dim, " and ", a.v_dim, " ",
                dtype_name(a.dtype), "; expected multiples of 8 up to ", kMaxHeadDim,
                ", bfloat16 or float16");
  }
  if (a.pages.page_bytes % 16 || a.pages.k_offset % 16 || a.pages.v_offset % 16) {
    throw_error(ErrorCode::internal, "attention: pages of ", a.pages.page_bytes,
                " bytes with K at ", a.pages.k_offset, " and V at ", a.pages.v_offset,
                "; expected multiples of 16");
  }
  if (b.num_seqs < 0 || b.num_seqs > 65535 || b.tokens < 0 || b.most_keys < 0 ||
      b.most_keys > int64_t{1} << 30 || limits.multiprocessors <= 0) {
    throw_error(ErrorCode::internal, "attention: ", b.num_seqs, " sequences, ", b.tokens,
                " tokens, ", b.most_keys, " keys on ", limits.multiprocessors,
                " multiprocessors; expected at most 65535 sequences and 2^30 keys");
  }
}

// Slots of `unit` keys that `queries` queries in a row see at most.
int slots_for(const AttentionCudaArgs& a, int64_t most_keys, int64_t queries, int unit) {
  int64_t slots = ceil_div(most_keys, unit);
  if (a.window) slots = std::min(slots, ceil_div(a.window + queries - 2, unit) + 1);
  return static_cast<int>(std::max<int64_t>(slots, 1));
}

int slabs_of(int dim) {
  return (dim + 63) / 64;
}

size_t partial_bytes(const AttentionCudaArgs& a, int64_t rows, int slots) {
  return static_cast<size_t>(rows) * a.heads * slots * (a.v_dim + 2) * sizeof(float);
}

// Splits make more blocks, spans fewer partial results: spans where they still fill the device six
// times over. More than eight fillings of blocks only cost their start, and with few sequences two
// do, since a graph captured for long pasts also runs with short ones. Not yet measured.
void plan_decode(const AttentionCudaArgs& a, const AttentionBounds& b, const GpuLimits& limits,
                 AttentionPlan& p) {
  const size_t other = kExchangeBytes + size_t{2048} * slabs_of(a.k_dim);
  const int64_t resident_of_one =
      std::max<int64_t>(1, (limits.shared_bytes + kReservedShared) /
                               (kStages * kSlabBytes + other + kReservedShared));
  const int64_t resident = limits.multiprocessors * resident_of_one;
  const int64_t pairs = std::max<int64_t>(1, int64_t{a.kv_heads} * p.parts * b.num_seqs);
  const int spans = slots_for(a, b.most_keys, 1, kSpanTokens);
  p.decode = b.decode;
  p.decode_spans = pairs * spans >= 6 * resident;
  p.decode_slots = p.decode_spans ? spans : slots_for(a, b.most_keys, 1, kSplitTokens);
  const int64_t fillings = pairs * 4 < resident ? 2 : 8;
  p.decode_blocks =
      static_cast<int>(std::min<int64_t>(p.decode_slots, ceil_div(fillings * resident, pairs)));
  const int64_t splits = ceil_div(p.decode_slots, p.decode_blocks) * (p.decode_spans ? kStages : 1);
  p.decode_stages = static_cast<int>(
      std::min<int64_t>(kStages, splits * (slabs_of(a.k_dim) + slabs_of(a.v_dim))));
  p.decode_shared_bytes = p.decode_stages * kSlabBytes + other;
  if (p.decode)
    p.workspace_bytes = std::max(p.workspace_bytes, partial_bytes(a, b.num_seqs, p.decode_slots));
}

// The largest tile whose queries, ring and totals fit.
void plan_chunks(const AttentionCudaArgs& a, const AttentionBounds& b, const GpuLimits& limits,
                 AttentionPlan& p) {
  const int slabs = a.v_dim <= 64 ? 1 : 2;  // of a warp, as the kernel is compiled
  p.chunks = b.chunks;
  p.column_halves = a.v_dim <= 128 ? 1 : 2;
  const auto fits = [&](int warps, int stages) {
    p.tile_warps = warps;
    p.chunk_stages = stages;
    p.tile_tokens = warps * 16 / p.part_heads;
    const int64_t blocks = ceil_div(b.tokens, p.tile_tokens) * a.kv_heads * p.parts;
    p.chunk_slots = slots_for(a, b.most_keys, std::max(b.tokens, 1), kSpanTokens);
    const size_t bytes = partial_bytes(a, b.tokens, p.chunk_slots);
    p.chunk_spans = p.chunk_slots > 1 && blocks < 2 * limits.multiprocessors &&
                    bytes <= kMostPartialBytes && b.tokens <= 65535;
    p.chunk_totals = p.chunk_slots > 1 && !p.chunk_spans;
    p.chunk_shared_bytes = stages * kSlabBytes + size_t{2048} * warps * slabs_of(a.k_dim) +
                           (p.chunk_totals ? size_t{4096} * warps * p.column_halves * slabs : 0);
    return p.chunk_shared_bytes <= limits.shared_bytes;
  };
  // Slabs are copied by 64 threads at least: their rows are swizzled by eights.
  if (!(p.column_halves == 1 && fits(4, kStages)) && !fits(2, kStages) && !fits(2, 3) &&
      !(p.column_halves == 2 && fits(1, 3))) {
    throw_error(ErrorCode::internal, "attention: a block needs ", p.chunk_shared_bytes,
                " bytes of shared memory, the device gives ", limits.shared_bytes);
  }
  if (p.chunks && p.chunk_spans)
    p.workspace_bytes = std::max(p.workspace_bytes, partial_bytes(a, b.tokens, p.chunk_slots));
}

// Keys that queries [begin, end) see any of.
int64_t visible(const AttentionCudaArgs& a, int64_t begin, int64_t end) {
  const int64_t lo = a.window ? std::max<int64_t>(begin - a.window + 1, 0) : 0;
  return end - lo;
}

}  // namespace

AttentionPlan plan_attention(const AttentionCudaArgs& args, const AttentionBounds& bounds,
                             const GpuLimits& limits) {
  check(args, bounds, limits);
  AttentionPlan plan{};
  const int group = args.heads / args.kv_heads;
  plan.parts = static_cast<int>(ceil_div(group, kMaxHeadRows));
  plan.part_heads = static_cast<int>(ceil_div(group, plan.parts));
  plan_decode(args, bounds, limits, plan);
  plan_chunks(args, bounds, limits, plan);
  return plan;
}

int64_t attention_kv_bytes(const AttentionCudaArgs& args, const AttentionPlan& plan,
                           const HostSeq* seqs, int num_seqs) {
  int64_t keys = 0;
  for (const HostSeq* s = seqs; s < seqs + num_seqs; ++s) {
    if (s->q_len == 1) keys += visible(args, s->kv_begin, s->kv_begin + 1);
    for (int64_t t = 0; s->q_len > 1 && t < s->q_len;) {  // tiles are cut from the step's tokens
      const int64_t tile_end = ((s->q_begin + t) / plan.tile_tokens + 1) * plan.tile_tokens;
      const int64_t end = std::min(s->q_len, tile_end - s->q_begin);
      keys += visible(args, s->kv_begin + t, s->kv_begin + end);
      t = end;
    }
  }
  return keys * args.kv_heads * plan.parts * (args.k_dim + args.v_dim) * 2;
}

namespace {

class AttentionState final : public GpuState {
 public:
  explicit AttentionState(GpuContext& gpu) : gpu_(gpu) {}
  float* workspace(size_t bytes) {
    gpu_.grow(workspace_, bytes);
    return workspace_.as<float>();
  }
  void release() noexcept override { workspace_ = DeviceBuffer(); }

 private:
  GpuContext& gpu_;
  DeviceBuffer workspace_;
};

}  // namespace

float* attention_workspace(GpuContext& gpu, size_t bytes) {
  return gpu.state<AttentionState>().workspace(bytes);
}

void attention(GpuKind kind, StreamHandle stream, const AttentionLaunch& launch) {
  AttentionLaunch filled = launch;
  if (filled.args.out_stride == 0) filled.args.out_stride = launch.args.heads * launch.args.v_dim;
  attention_cuda(kind).attention(stream, filled);
}

}  // namespace turbomind
