// A thread per token.
#include "ops/next_tokens_cuda.h"

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = 64;

TM_KERNEL(kThreads, 1) void next_tokens(const TM_GRID_CONSTANT DeviceNextTokens p) {
  let_next_start();
  wait_for_previous();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= p.count) return;
  const int32_t from = load(p.from + i);
  if (from < 0) return;
  const int32_t token = load(p.sampled + from);
  store(p.token_ids + i, token < 0 ? 0 : token);
}

void fill(StreamHandle stream, const DeviceNextTokens& tokens) {
  const dim3 grid(static_cast<unsigned>((tokens.count + kThreads - 1) / kThreads));
  launch<next_tokens>(stream, grid, kThreads, 0, tokens);
}

}  // namespace

extern const NextTokensCuda kNextTokensCuda;
const NextTokensCuda kNextTokensCuda{fill};

}  // namespace turbomind::TM_CUDA_NS
