// A block per token, or a few where tokens are few; 8 heads of it at a time, two per warp where
// they have at most 128 columns. A lane has 8 values that follow each other, one 16-byte store; a
// rotation's other half comes through shared memory. The
// angles of a token are computed once per block, while the projection still runs: a block has few
// enough bytes of shared memory (4.5 KiB at 128 columns) to lie beside one of the skinny product.
#include "ops/rope_kv_cuda.h"

#include <algorithm>

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

namespace {

constexpr int kHeads = 8;  // that a block takes at a time
constexpr int kPageTokens = 64;
constexpr int kLaneValues = 8;

// Lanes of a head, 8 values each.
TM_DEVICE int head_lanes() {
  return static_cast<int>(blockDim.x) / kHeads;
}
int head_lanes(const RopeKvCudaArgs& a) {
  return std::max(a.k_dim, a.v_dim) <= kWarp / 2 * kLaneValues ? kWarp / 2 : kWarp;
}

// Shared memory: the values of each of the block's heads, then cos and sin of the token's angles.
TM_DEVICE float* shared_head(const RopeKvCudaArgs& a) {
  return shared_memory<float>() + static_cast<int>(threadIdx.x) / head_lanes() * a.k_dim;
}
TM_DEVICE float2* shared_angles(const RopeKvCudaArgs& a) {
  return reinterpret_cast<float2*>(shared_memory<float>() + kHeads * a.k_dim);
}
size_t shared_bytes(const RopeKvCudaArgs& a) {
  return kHeads * a.k_dim * sizeof(float) + a.half * sizeof(float2);
}

// cos and sin of x, a float of any size up to 2^30, to double's rounding: x less a multiple k of
// pi/2 in two pieces, then the power series on [-pi/4, pi/4], whose first missing term is below
// 3e-14.
TM_DEVICE float2 cos_sin(float x) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPi = 1.5707963267948965580, kHalfPiRest = 6.1232339957367660359e-17;
  const double k = ::rint(x * kTwoOverPi);
  const double r = ::fma(-k, kHalfPiRest, ::fma(-k, kHalfPi, static_cast<double>(x)));
  const double r2 = r * r;
  double s = 0, c = 0;
  for (int n = 13; n >= 1; n -= 2) {  // sin r / r and cos r, from the last term on
    s = ::fma(-s, r2 * (1.0 / ((n + 1) * (n + 2))), 1.0);
    c = ::fma(-c, r2 * (1.0 / (n * (n + 1))), 1.0);
  }
  s *= r;
  const int quarter = static_cast<int>(static_cast<int64_t>(k) & 3);
  const double cos = quarter % 2 ? s : c, sin = quarter % 2 ? c : s;
  return make_float2(static_cast<float>(quarter == 1 || quarter == 2 ? -cos : cos),
                     static_cast<float>(quarter >= 2 ? -sin : sin));
}

TM_DEVICE void compute_angles(const RopeKvCudaArgs& a, int token) {
  const float position = static_cast<float>(load_constant(a.positions + token));
  for (int i = threadIdx.x; i < a.half; i += blockDim.x) {
    const float2 t = cos_sin(position * load_constant(a.inv_freq + i));
    shared_angles(a)[i] = make_float2(t.x * a.attention_factor, t.y * a.attention_factor);
  }
}

// x / rms(x) * (weight + offset), without a weight x / rms(x); eps 0: x. Called by whole warps.
TM_DEVICE void norm_head(const float* weight, float offset, float eps, int dim, int at,
                         float (&x)[kLaneValues]) {
  float sum = 0;
  for (int i = 0; i < kLaneValues; ++i) sum = fma(x[i], x[i], sum);
  for (int step = head_lanes() / 2; step > 0; step /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, step);
  if (eps == 0 || at >= dim) return;
  const float r = rsqrt(sum / static_cast<float>(dim) + eps);
  if (!weight) {
    for (int i = 0; i < kLaneValues; ++i) x[i] *= r;
    return;
  }
  for (int i = 0; i < kLaneValues; i += 4) {
    const float4 w = load(reinterpret_cast<const float4*>(weight + at + i));
    x[i] = x[i] * r * (w.x + offset);
    x[i + 1] = x[i + 1] * r * (w.y + offset);
    x[i + 2] = x[i + 2] * r * (w.z + offset);
    x[i + 3] = x[i + 3] * r * (w.w + offset);
  }
}

// Pairs (i, i + half), or (2i, 2i + 1): (a, b) becomes (a cos - b sin, b cos + a sin). Called by
// whole warps; `at` of lanes with nothing to rotate is a.k_dim or more.
TM_DEVICE void rotate_head(const RopeKvCudaArgs& a, int at, float (&x)[kLaneValues]) {
  const float2* angle = shared_angles(a);
  float* head = shared_head(a);
  if (at < a.k_dim)
    for (int i = 0; i < kLaneValues; ++i) head[at + i] = x[i];
  __syncwarp();
  for (int i = 0; i < kLaneValues; ++i) {
    const int d = at + i;
    if (d >= 2 * a.half) continue;
    const bool first = a.interleaved ? d % 2 == 0 : d < a.half;
    const int pair = a.interleaved ? d / 2 : first ? d : d - a.half;
    const float other = head[a.interleaved ? d ^ 1 : first ? d + a.half : d - a.half];
    const float2 t = angle[pair];
    x[i] = fma(x[i], t.x, (first ? -other : other) * t.y);
  }
  __syncwarp();  // the next head takes this one's place
}

// Returns the address of a token's K or V of one head; null: the token is padding.
struct Place {
  uint8_t* page;
  int slot;

  TM_DEVICE uint16_t* row(int64_t offset, int head, int dim) const {
    if (!page) return nullptr;
    return reinterpret_cast<uint16_t*>(page + offset) + (int64_t{head} * kPageTokens + slot) * dim;
  }
};

TM_DEVICE Place find_place(const RopeKvCudaArgs& a, int seq, int token) {
  const int index =
      load_constant(a.seqs.kv_begin + seq) + token - load_constant(a.seqs.q_begin + seq);
  const int page =
      load_constant(a.seqs.pages + int64_t{seq} * a.seqs.max_pages + index / kPageTokens);
  if (page < 0) return {nullptr, 0};
  return {a.pages.base + page * a.pages.page_bytes, index % kPageTokens};
}

}  // namespace

template <typename T>
TM_KERNEL(kHeads* kWarp, 4)
void rope_write_heads(const TM_GRID_CONSTANT RopeKvLaunch w) {
  let_next_start();
  const RopeKvCudaArgs& a = w.args;
  const int token = blockIdx.x, seq = load_constant(a.seqs.seq_of_token + token);
  if (seq < 0 || load_constant(a.seqs.q_len + seq) == 0) return wait_for_previous();
  const Place place = find_place(a, seq, token);
  if (a.half) compute_angles(a, token);
  __syncthreads();
  wait_for_previous();

  const int head = static_cast<int>(threadIdx.x) / head_lanes();
  const int at = static_cast<int>(threadIdx.x) % head_lanes() * kLaneValues;
  const int rotated = a.heads + a.kv_heads, items = rotated + a.kv_heads;
  const float* row = a.qkv + token * (int64_t{rotated} * a.k_dim + int64_t{a.kv_heads} * a.v_dim);
  // Two heads of a warp may be a query and a key, or a key and a value.
  for (int first = blockIdx.y * kHeads; first < items; first += w.blocks * kHeads) {
    const int item = first + head;
    const bool value = item >= rotated, query = item < a.heads;
    const int dim = item >= items ? 0 : value ? a.v_dim : a.k_dim;
    const float* from = row + (value ? int64_t{rotated} * a.k_dim + int64_t{item - rotated} * dim
                                     : int64_t{item} * dim);
    float x[kLaneValues] = {};
    for (int i = 0; at < dim && i < kLaneValues; i += 4) {
      const float4 v = load_streaming(reinterpret_cast<const float4*>(from + at + i));
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
    if (a.q_weight || a.k_weight || a.v_eps > 0) {
      const float* weight = value ? nullptr : query ? a.q_weight : a.k_weight;
      const float eps = value ? a.v_eps : !weight ? 0 : query ? a.q_eps : a.k_eps;
      norm_head(weight, query ? a.q_offset : a.k_offset, eps, dim, at, x);
    }
    if (a.half) rotate_head(a, value ? a.k_dim : at, x);
    uint16_t* to = query   ? static_cast<uint16_t*>(a.q) + (int64_t{token} * a.heads + item) * dim
                   : value ? place.row(a.pages.v_offset, item - rotated, dim)
                           : place.row(a.pages.k_offset, item - a.heads, dim);
    if (at < dim && to)
      store(reinterpret_cast<uint4*>(to + at),
            make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]),
                       pack2<T>(x[6], x[7])));
  }
}

static void write(StreamHandle stream, const RopeKvLaunch& w) {
  const dim3 grid(w.args.seqs.tokens, w.blocks);
  const int threads = kHeads * head_lanes(w.args);
  if (w.args.dtype == DType::bf16)
    launch<rope_write_heads<Bf16>>(stream, grid, threads, shared_bytes(w.args), w);
  else
    launch<rope_write_heads<F16>>(stream, grid, threads, shared_bytes(w.args), w);
}

extern const RopeKvCuda kRopeKvCuda;
const RopeKvCuda kRopeKvCuda{write};

}  // namespace turbomind::TM_CUDA_NS
