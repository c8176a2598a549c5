#include "ops/routing.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "cuda/dispatch.h"
#include "cuda/gpu_context.h"
#include "ops/dispatch.h"
#include "ops/routing_cuda.h"

namespace turbomind {

TM_GPU_TABLE(RoutingCuda, kRoutingCuda, routing_cuda)

namespace {

constexpr OpTypes kLogitTypes{"route", "logits", {DType::f32}, {DType::f32}};
constexpr OpTypes kOutputTypes{"combine", "outputs", {DType::f32}, {DType::f32}};
constexpr int64_t kChoiceTask = 8;   // tokens: fewer are chosen faster than a barrier takes
constexpr int64_t kSumTask = 16384;  // elements

void check(const RouteShape& s, const Mat& logits, const Routing& r) {
  if (s.experts < 1 || s.experts > kMaxExperts || s.top_k < 1 || s.top_k > kMaxTopK ||
      s.top_k > s.experts)
    throw_error(ErrorCode::internal, "route: top ", s.top_k, " of ", s.experts,
                " experts, expected at most ", kMaxTopK, " of ", kMaxExperts);
  if (logits.cols != s.experts || logits.rows != r.tokens || r.top_k != s.top_k ||
      r.experts != s.experts)
    throw_error(ErrorCode::internal, "route: logits are [", logits.rows, ", ", logits.cols,
                "], the routing is of ", r.tokens, " tokens to ", r.top_k, " of ", r.experts,
                " experts");
}

// The top_k highest of `logits`, by ascending expert. Every expert is taken at most once, also
// where logits are NaN.
void choose(const RouteShape& s, const float* logits, int32_t* experts) {
  std::array<bool, kMaxExperts> taken;
  std::fill_n(taken.begin(), s.experts, false);
  for (int c = 0; c < s.top_k; ++c) {
    int best = -1;
    for (int e = 0; e < s.experts; ++e)
      if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
    taken[best] = true;
    experts[c] = best;
  }
  std::sort(experts, experts + s.top_k);
}

void weigh(const RouteShape& s, const float* logits, const int32_t* experts, float* weights) {
  float top = logits[experts[0]], sum = 0;
  for (int c = 1; c < s.top_k; ++c) top = std::max(top, logits[experts[c]]);
  if (!s.renormalize)
    for (int e = 0; e < s.experts; ++e) sum += std::exp(logits[e] - top);
  for (int c = 0; c < s.top_k; ++c) {
    weights[c] = std::exp(logits[experts[c]] - top);
    if (s.renormalize) sum += weights[c];
  }
  for (int c = 0; c < s.top_k; ++c) {
    weights[c] /= sum;
    if (s.scale != nullptr) weights[c] *= s.scale[experts[c]];
  }
}

// A counting sort, which keeps tokens in their order.
void order(const Routing& r) {
  std::fill_n(r.begin, r.experts + 1, 0);
  for (int64_t c = 0; c < r.rows(); ++c) ++r.begin[r.expert[c] + 1];
  for (int e = 0; e < r.experts; ++e) r.begin[e + 1] += r.begin[e];
  std::array<int32_t, kMaxExperts> next;
  std::copy_n(r.begin, r.experts, next.begin());
  for (int64_t c = 0; c < r.rows(); ++c) {
    r.row[c] = next[r.expert[c]]++;
    r.token[r.row[c]] = static_cast<int32_t>(c / r.top_k);
  }
}

void route_on_cpu(Context& ctx, const RouteShape& s, const Mat& logits, const Routing& r) {
  ctx.pool.parallel_for(r.tokens, kChoiceTask, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      choose(s, logits.f32(t), r.expert + t * s.top_k);
      weigh(s, logits.f32(t), r.expert + t * s.top_k, r.weight + t * s.top_k);
    }
  });
  order(r);
}

void route_on_gpu(GpuContext& gpu, const RouteShape& s, const Mat& logits, const Routing& r) {
  const DeviceRoute route{s, r, logits.f32(0), logits.stride};
  routing_cuda(gpu.kind()).choose(gpu.handle(), route);
  routing_cuda(gpu.kind()).order(gpu.handle(), route);
}

void combine_on_cpu(Context& ctx, const Routing& r, const Mat& outputs, const BesideExperts& beside,
                    bool add, const Mat& y) {
  const int64_t grain = std::max<int64_t>(1, kSumTask / (y.cols * r.top_k));
  ctx.pool.parallel_for(y.rows, grain, [&](int64_t begin, int64_t end, int) {
    constexpr int64_t kCols = 256;  // sums that stay in the first-level cache
    alignas(64) float sums[kCols];
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t first = 0; first < y.cols; first += kCols) {
        const int64_t count = std::min(kCols, y.cols - first);
        std::fill_n(sums, count, 0.0f);
        for (int64_t c = t * r.top_k; c < (t + 1) * r.top_k; ++c) {
          const float* out = outputs.f32(r.row[c]) + first;
          const float weight = r.weight[c];
          for (int64_t i = 0; i < count; ++i) sums[i] += weight * out[i];
        }
        if (beside.out.data != nullptr) {
          const float* out = beside.out.f32(t) + first;
          const float scale =
              beside.gate.data != nullptr ? 1 / (1 + std::exp(-*beside.gate.f32(t))) : 1.0f;
          for (int64_t i = 0; i < count; ++i) sums[i] += scale * out[i];
        }
        float* to = y.f32(t) + first;
        for (int64_t i = 0; i < count; ++i) to[i] = add ? to[i] + sums[i] : sums[i];
      }
    }
  });
}

void combine_on_gpu(GpuContext& gpu, const Routing& r, const Mat& outputs,
                    const BesideExperts& beside, bool add, const Mat& y) {
  DeviceCombine c;
  c.routing = r;
  c.outputs = outputs.f32(0);
  c.beside = static_cast<const float*>(beside.out.data);
  c.beside_stride = beside.out.stride;
  c.gate = static_cast<const float*>(beside.gate.data);
  c.gate_stride = beside.gate.stride;
  c.y = y.f32(0);
  c.x_stride = outputs.stride;
  c.y_stride = y.stride;
  c.cols = static_cast<int32_t>(y.cols);
  c.add = add;
  routing_cuda(gpu.kind()).combine(gpu.handle(), c);
}

}  // namespace

Routing routing_in(void* memory, int64_t tokens, const RouteShape& shape) {
  const int64_t choices = tokens * shape.top_k;
  auto* at = static_cast<int32_t*>(memory);
  Routing r;
  r.tokens = tokens;
  r.top_k = shape.top_k;
  r.experts = shape.experts;
  r.expert = at;
  r.weight = reinterpret_cast<float*>(at + choices);
  r.row = at + 2 * choices;
  r.token = at + 3 * choices;
  r.begin = at + 4 * choices;
  return r;
}

void route(Context& ctx, const RouteShape& shape, const Mat& logits, const Routing& routing) {
  check_dtype(ctx, kLogitTypes, logits.dtype);
  check(shape, logits, routing);
  const double bytes = 4.0 * static_cast<double>(logits.rows * logits.cols + 4 * routing.rows());
  const ProfileScope profile(ctx.profiler, Op::other, bytes, 0, ctx.profiler.device);
  dispatch(ctx, route_on_cpu, route_on_gpu, shape, logits, routing);
}

void combine(Context& ctx, const Routing& routing, const Mat& outputs, const BesideExperts& beside,
             bool add, const Mat& y) {
  check_dtype(ctx, kOutputTypes, outputs.dtype);
  check_dtype(ctx, kOutputTypes, y.dtype);
  if (outputs.rows != routing.rows() || y.rows != routing.tokens || y.cols != outputs.cols)
    throw_error(ErrorCode::internal, "combine: outputs are [", outputs.rows, ", ", outputs.cols,
                "] and y is [", y.rows, ", ", y.cols, "], expected ", routing.rows(), " and ",
                routing.tokens, " rows of one width");
  const bool has_beside = beside.out.data != nullptr, has_gate = beside.gate.data != nullptr;
  if ((has_beside && (beside.out.rows != y.rows || beside.out.cols != y.cols)) ||
      (has_gate && (beside.gate.rows != y.rows || beside.gate.cols != 1)))
    throw_error(ErrorCode::internal, "combine: beside the experts is [", beside.out.rows, ", ",
                beside.out.cols, "] with [", beside.gate.rows, ", ", beside.gate.cols,
                "] gates, expected the shape of y and a gate per row");
  const double elements = static_cast<double>(outputs.rows * outputs.cols);
  const ProfileScope profile(ctx.profiler, Op::other, 4 * elements, 2 * elements,
                             ctx.profiler.device);
  dispatch(ctx, combine_on_cpu, combine_on_gpu, routing, outputs, beside, add, y);
}

}  // namespace turbomind
