// A warp chooses the experts of a token: each lane searches every 32nd logit, and the warp takes
// the best of the lanes, top_k times. A block orders the rows of one expert: it reads the choices
// of all tokens, which the second-level cache holds, and takes its own in their order, so that
// nothing depends on which block comes first. The host learns nothing of all this; products by
// groups read `begin` on the device. No time was measured.
#include "cuda/block_scan.h"
#include "cuda/four_cuda.h"
#include "cuda/kernel.h"
#include "ops/routing_cuda.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kChooseWarps = 4;
constexpr int kThreads = 256;
constexpr int kEach = 4;  // choices of a thread of `order` at a time
constexpr int kColsPerBlock = 4 * kThreads;

// Orders as the logits do, with 0 for none.
TM_DEVICE uint32_t key_of(float logit) {
  const float v = logit + 0.0f;  // -0 becomes 0
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  const uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
  return key == 0 ? 1 : key;
}

// Returns the expert with the highest key, of equal ones the first, to every lane, and takes it
// out.
TM_DEVICE int take_best(uint32_t* keys, int experts) {
  unsigned long long best = 0;
  for (int e = lane_index(); e < experts; e += kWarp) {
    const unsigned long long own =
        static_cast<unsigned long long>(keys[e]) << 32 | (kMaxExperts - e);
    if (keys[e] != 0 && own > best) best = own;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const unsigned long long other = __shfl_xor_sync(kAllLanes, best, step);
    if (other > best) best = other;
  }
  const int expert = kMaxExperts - static_cast<int>(best & 0xffffffffu);
  if (expert % kWarp == lane_index()) keys[expert] = 0;
  return expert;
}

TM_KERNEL(kChooseWarps* kWarp, 1) void choose_experts(const TM_GRID_CONSTANT DeviceRoute p) {
  let_next_start();
  wait_for_previous();
  const int token = static_cast<int>(blockIdx.x) * kChooseWarps + warp_index();
  if (token >= p.routing.tokens) return;  // the whole warp
  const int experts = p.shape.experts, top_k = p.shape.top_k, lane = lane_index();
  const float* logits = p.logits + token * p.stride;
  uint32_t* keys = shared_memory<uint32_t>() + warp_index() * experts;
  for (int e = lane; e < experts; e += kWarp) keys[e] = key_of(load(logits + e));
  int expert = 0, first = 0;  // of this lane's choice, and of the highest logit
  for (int c = 0; c < top_k; ++c) {
    const int best = take_best(keys, experts);
    if (c == 0) first = best;
    if (c == lane) expert = best;
  }
  const bool chosen = lane < top_k;
  const float top = load(logits + first);
  const float own = chosen ? fast_exp(load(logits + expert) - top) : 0.0f;
  float part = own;
  if (!p.shape.renormalize) {
    part = 0;
    for (int e = lane; e < experts; e += kWarp) part += fast_exp(load(logits + e) - top);
  }
  const float sum = warp_sum(part);
  int place = 0;  // among the choices by expert
  for (int c = 0; c < top_k; ++c) place += __shfl_sync(kAllLanes, expert, c) < expert ? 1 : 0;
  if (!chosen) return;
  store(p.routing.expert + int64_t{token} * top_k + place, expert);
  const float scale = p.shape.scale != nullptr ? load(p.shape.scale + expert) : 1.0f;
  store(p.routing.weight + int64_t{token} * top_k + place, own / sum * scale);
}

// One block per expert.
TM_KERNEL(kThreads, 4) void order_rows(const TM_GRID_CONSTANT DeviceRoute p) {
  let_next_start();
  wait_for_previous();
  const Routing& r = p.routing;
  const int expert = static_cast<int>(blockIdx.x), tid = static_cast<int>(threadIdx.x);
  const int rows = static_cast<int>(r.tokens) * r.top_k;
  WarpValues<int>& shared = *shared_memory<WarpValues<int>>();
  int lower = 0, own = 0;
  for (int c = tid; c < rows; c += kThreads) {
    const int other = load(r.expert + c);
    lower += other < expert ? 1 : 0;
    own += other == expert ? 1 : 0;
  }
  const auto sum = [](int a, int b) { return a + b; };
  int next = block_reduce(lower, shared, sum);
  own = block_reduce(own, shared, sum);
  if (tid == 0) {
    store(r.begin + expert, next);
    if (expert == r.experts - 1) store(r.begin + r.experts, rows);
  }
  if (own == 0) return;
  for (int first = 0; first < rows; first += kThreads * kEach) {
    bool mine[kEach];
    int count = 0, total = 0;
    for (int i = 0; i < kEach; ++i) {
      const int c = first + tid * kEach + i;
      mine[i] = c < rows && load(r.expert + c) == expert;
      count += mine[i] ? 1 : 0;
    }
    int row = next + block_scan_before(count, shared, &total);
    next += total;
    for (int i = 0; i < kEach; ++i) {
      if (!mine[i]) continue;
      const int c = first + tid * kEach + i;
      store(r.row + c, row);
      store(r.token + row, c / r.top_k);
      ++row;
    }
  }
}

// A block per token and 1024 columns.
TM_KERNEL(kThreads, 4) void combine_rows(const TM_GRID_CONSTANT DeviceCombine p) {
  let_next_start();
  wait_for_previous();
  const int c = blockIdx.y * kColsPerBlock + 4 * threadIdx.x;
  if (c >= p.cols) return;
  const int64_t choice = int64_t{blockIdx.x} * p.routing.top_k;
  float4 sum = make_float4(0, 0, 0, 0);
  for (int i = 0; i < p.routing.top_k; ++i) {
    const float weight = load(p.routing.weight + choice + i);
    const int64_t row = load(p.routing.row + choice + i);
    const float4 v = load_four(p.outputs + row * p.x_stride, c, p.cols);
    sum = make_float4(fma(weight, v.x, sum.x), fma(weight, v.y, sum.y), fma(weight, v.z, sum.z),
                      fma(weight, v.w, sum.w));
  }
  if (p.beside != nullptr) {
    const float gate = p.gate != nullptr ? load(p.gate + blockIdx.x * p.gate_stride) : 0.0f;
    const float scale = p.gate != nullptr ? 1.0f / (1.0f + fast_exp(-gate)) : 1.0f;
    const float4 v = load_four(p.beside + blockIdx.x * p.beside_stride, c, p.cols);
    sum = make_float4(fma(scale, v.x, sum.x), fma(scale, v.y, sum.y), fma(scale, v.z, sum.z),
                      fma(scale, v.w, sum.w));
  }
  float* y = p.y + blockIdx.x * p.y_stride;
  if (p.add) {
    const float4 v = load_four(y, c, p.cols);
    sum = make_float4(v.x + sum.x, v.y + sum.y, v.z + sum.z, v.w + sum.w);
  }
  store_four(y, c, p.cols, sum);
}

void choose(StreamHandle stream, const DeviceRoute& r) {
  const auto blocks = static_cast<unsigned>((r.routing.tokens + kChooseWarps - 1) / kChooseWarps);
  launch<choose_experts>(stream, dim3(blocks), kChooseWarps * kWarp,
                         static_cast<size_t>(kChooseWarps * r.shape.experts) * sizeof(uint32_t), r);
}

void order(StreamHandle stream, const DeviceRoute& r) {
  launch<order_rows>(stream, dim3(static_cast<unsigned>(r.shape.experts)), kThreads,
                     sizeof(WarpValues<int>), r);
}

void combine(StreamHandle stream, const DeviceCombine& c) {
  const dim3 grid(static_cast<unsigned>(c.routing.tokens),
                  static_cast<unsigned>((c.cols + kColsPerBlock - 1) / kColsPerBlock));
  launch<combine_rows>(stream, grid, kThreads, 0, c);
}

}  // namespace

extern const RoutingCuda kRoutingCuda;
const RoutingCuda kRoutingCuda{choose, order, combine};

}  // namespace turbomind::TM_CUDA_NS
