#include "ops/rope_kv_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "cuda/dispatch.h"

namespace turbomind {

TM_GPU_TABLE(RopeKvCuda, kRopeKvCuda, rope_kv_cuda)

static void check(const RopeKvCudaArgs& a) {
  const auto width = [](int dim) { return dim > 0 && dim % 8 == 0 && dim <= kMaxHeadDim; };
  if (!width(a.k_dim) || !width(a.v_dim) || a.dtype == DType::f32 || a.heads <= 0 ||
      a.kv_heads <= 0) {
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

// A warp takes a head; blocks of 8 warps, as many as fill the device twice.
void rope_write_kv(GpuKind kind, StreamHandle stream, const RopeKvCudaArgs& args,
                   int multiprocessors) {
  check(args);
  const int tokens = std::max(args.seqs.tokens, 1);
  const int items = args.heads + 2 * args.kv_heads;
  const int wanted = (2 * multiprocessors + tokens - 1) / tokens;
  rope_kv_cuda(kind).write(stream, {args, std::clamp(wanted, 1, (items + 7) / 8)});
}

}  // namespace turbomind
