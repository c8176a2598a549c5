#include "ops/next_tokens.h"

#include <algorithm>

#include "cuda/dispatch.h"
#include "cuda/gpu_context.h"
#include "ops/dispatch.h"
#include "ops/next_tokens_cuda.h"

namespace turbomind {

TM_GPU_TABLE(NextTokensCuda, kNextTokensCuda, next_tokens_cuda)

namespace {

void on_cpu(Context&, const int32_t* from, const int32_t* sampled, int32_t* token_ids,
            int32_t count) {
  for (int32_t i = 0; i < count; ++i)
    if (from[i] >= 0) token_ids[i] = std::max(sampled[from[i]], 0);
}

void on_gpu(GpuContext& gpu, const int32_t* from, const int32_t* sampled, int32_t* token_ids,
            int32_t count) {
  next_tokens_cuda(gpu.kind()).fill(gpu.handle(), {from, sampled, token_ids, count});
}

}  // namespace

void next_tokens(Context& ctx, const int32_t* from, const int32_t* sampled, int32_t* token_ids,
                 int32_t count) {
  dispatch(ctx, on_cpu, on_gpu, from, sampled, token_ids, count);
}

}  // namespace turbomind
