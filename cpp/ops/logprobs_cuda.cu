// One block per row. Sums are double and of a fixed shape, so a row's bits depend on the row alone.
//
// Tokens are ordered by a rank of 52 bits: the logit's key, and below it the id, lower ones first.
// The likeliest are looked for among those that are no worse than the best of enough warps, few
// as a rule; where there are many, a radix search finds the rank of the last one wanted. Three
// passes over the row as a rule, up to nine.
#include "ops/logprobs_cuda.h"

#include "cuda/block_scan.h"
#include "cuda/integers.h"
#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPerThread = 4;  // logits of one 16-byte load
constexpr int kTile = kThreads * kPerThread;
constexpr int kTogether = 4;     // loads of a thread under way at once
constexpr int kIdBits = 20;      // of a vocabulary of kMaxSampledVocab
constexpr int kRoom = kThreads;  // tokens that are put in order, one by each thread
// The radix search: 11, 11, 10, 10 and 10 bits of a rank, highest first.
constexpr int kRankBits = 32 + kIdBits;
constexpr int kBins = 2048;

static_assert(kMostTopTokens <= kRoom);

struct Shared {
  uint64_t chosen[kRoom];
  uint32_t count[kBins];
  uint64_t warp_best[kWarps];
  uint64_t floor;
  WarpValues<double> sums;
  WarpValues<uint32_t> counts;
  uint32_t found_bin;
  uint32_t found_before;
  uint32_t found_count;
};

TM_DEVICE uint64_t larger(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}
template <typename T>
TM_DEVICE T sum_of(T a, T b) {
  return a + b;
}

// The likelier one's is higher, -inf is the lowest; NaN does not come here.
TM_DEVICE uint64_t rank_of(float x, int id) {
  const uint32_t bits = __float_as_uint(x);
  const uint32_t key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{key} << kIdBits | ((1u << kIdBits) - 1 - id);
}
TM_DEVICE float logit_of(uint64_t rank) {
  const uint32_t key = static_cast<uint32_t>(rank >> kIdBits);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
TM_DEVICE int id_of(uint64_t rank) {
  return (1 << kIdBits) - 1 - static_cast<int>(rank & ((1u << kIdBits) - 1));
}

struct Row {
  const float* logits;
  int vocab;

  // Four logits from `begin` on; -inf past the end. Zeros lose their sign: they are equal.
  TM_DEVICE void read(int begin, float (&x)[kPerThread]) const {
    for (int i = 0; i < kPerThread; ++i) x[i] = -INFINITY;
    if (begin + kPerThread <= vocab) {
      const float4 v = load(reinterpret_cast<const float4*>(logits + begin));
      x[0] = v.x + 0.0f, x[1] = v.y + 0.0f, x[2] = v.z + 0.0f, x[3] = v.w + 0.0f;
    } else {
      for (int i = 0; i < kPerThread && begin + i < vocab; ++i)
        x[i] = load(logits + begin + i) + 0.0f;
    }
  }
  // f(id, x) for this thread's logits, four neighbours each, several loads under way.
  template <typename F>
  TM_DEVICE void for_each_four(const F& f) const {
    for (int at = static_cast<int>(threadIdx.x) * kPerThread; at < vocab; at += kTogether * kTile) {
      float x[kTogether][kPerThread];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) read(at + j * kTile, x[j]);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) f(at + j * kTile, x[j]);
    }
  }
  // f(rank) for this thread's tokens.
  template <typename F>
  TM_DEVICE void for_each_rank(const F& f) const {
    for_each_four([&](int begin, const float (&x)[kPerThread]) {
      for (int i = 0; i < kPerThread; ++i)
        if (begin + i < vocab) f(rank_of(x[i], begin + i));
    });
  }
};

// The best of each warp into s.warp_best; returns the best of all.
TM_DEVICE uint64_t find_best(const Row& row, Shared& s) {
  uint64_t best = 0;
  row.for_each_rank([&](uint64_t rank) { best = larger(best, rank); });
  for (int step = kWarp / 2; step > 0; step /= 2)
    best = larger(best, __shfl_xor_sync(kAllLanes, best, step));
  if (lane_index() == 0) s.warp_best[warp_index()] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) best = larger(best, s.warp_best[w]);
  return best;
}

// A rank that at least `wanted` tokens reach: that of the wanted-th of the warps in the order of
// their best, or none where there are not so many.
TM_DEVICE uint64_t find_floor(int wanted, Shared& s) {
  if (threadIdx.x == 0) s.floor = 0;
  __syncthreads();
  if (threadIdx.x < kWarps) {
    const uint64_t mine = s.warp_best[threadIdx.x];
    int before = 0;
    for (int w = 0; w < kWarps; ++w) before += s.warp_best[w] > mine;
    if (mine > 0 && before == wanted - 1) s.floor = mine;
  }
  __syncthreads();
  return s.floor;
}

// Counts the tokens of ranks >= floor whose bits above `shift` + `bits` are those of `cut`, by the
// `bits` below.
TM_DEVICE void fill_bins(const Row& row, uint64_t floor, uint64_t cut, int shift, int bits,
                         Shared& s) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) s.count[i] = 0;
  __syncthreads();
  row.for_each_rank([&](uint64_t rank) {
    if (rank < floor || rank >> (shift + bits) != cut >> (shift + bits)) return;
    atomic_add_shared(&s.count[rank >> shift & ((1u << bits) - 1)], 1u);
  });
  __syncthreads();
}

// The bin, from the highest down, with which the count reaches `wanted`. Each thread has two
// neighbouring bins.
TM_DEVICE void find_bin(uint32_t wanted, int bits, Shared& s) {
  const int top = (1 << bits) - 1 - 2 * static_cast<int>(threadIdx.x);
  uint32_t count[2] = {}, all;
  for (int i = 0; i < 2; ++i)
    if (top - i >= 0) count[i] = s.count[top - i];
  uint32_t before = block_scan_before(count[0] + count[1], s.counts, &all);
  for (int i = 0; i < 2; ++i) {
    if (before < wanted && before + count[i] >= wanted)
      s.found_bin = top - i, s.found_before = before, s.found_count = count[i];
    before += count[i];
  }
  __syncthreads();
}

// The rank that exactly `wanted` tokens reach.
TM_DEVICE uint64_t find_cut(const Row& row, uint64_t floor, uint32_t wanted, Shared& s) {
  uint64_t cut = 0;
  for (int shift = kRankBits; shift > 0;) {
    const int bits = shift > kRankBits - 22 ? 11 : 10;
    shift -= bits;
    fill_bins(row, floor, cut, shift, bits, s);
    find_bin(wanted, bits, s);
    cut |= uint64_t{s.found_bin} << shift;
    wanted -= s.found_before;
    if (s.found_count == wanted) break;  // all of them
  }
  return cut;
}

// Tokens of ranks >= cut, `mine` of them this thread's, into s.chosen, in no particular order;
// returns how many.
TM_DEVICE uint32_t choose(const Row& row, uint64_t cut, uint32_t mine, Shared& s) {
  uint32_t all, at = block_scan_before(mine, s.counts, &all);
  row.for_each_rank([&](uint64_t rank) {
    if (rank >= cut) s.chosen[at++] = rank;
  });
  __syncthreads();
  return all;
}

TM_DEVICE void put(Logprob* out, int id, float logit, double lse) {
  store(&out->token, id);
  store(&out->logprob, static_cast<float>(logit - lse));
}

TM_DEVICE void put_top(const Row& row, uint64_t cut, uint32_t mine, int top, double lse, Shared& s,
                       Logprob* out) {
  const uint32_t count = choose(row, cut, mine, s);
  if (threadIdx.x >= count) return;
  const uint64_t rank = s.chosen[threadIdx.x];
  int before = 0;
  for (uint32_t i = 0; i < count; ++i) before += s.chosen[i] > rank;
  if (before < top) put(out + before, id_of(rank), logit_of(rank), lse);
}

TM_DEVICE LogprobRow load_row(const LogprobRow* p) {
  LogprobRow row;
  row.logits_row = load(&p->logits_row);
  row.sampled = load(&p->sampled);
  row.top = load(&p->top);
  row.out = load(&p->out);
  return row;
}

TM_KERNEL(kThreads, 1) void logprob_rows(const TM_GRID_CONSTANT DeviceLogprobs p) {
  let_next_start();
  wait_for_previous();
  Shared& s = *shared_memory<Shared>();
  const LogprobRow job = load_row(p.rows + blockIdx.x);
  const int32_t token = load(p.tokens + job.sampled);
  if (token < 0) return;
  const Row row{p.logits + job.logits_row * p.stride, p.vocab};
  const float max = logit_of(find_best(row, s));
  uint64_t cut = find_floor(job.top, s);
  double sum = 0;
  uint32_t mine = 0;  // of this thread's tokens those that may be among the likeliest
  row.for_each_four([&](int begin, const float (&x)[kPerThread]) {
    sum += (expf(x[0] - max) + expf(x[1] - max)) + (expf(x[2] - max) + expf(x[3] - max));
    for (int i = 0; i < kPerThread; ++i)
      mine += begin + i < row.vocab && rank_of(x[i], begin + i) >= cut;
  });
  const double lse = max + log(block_reduce(sum, s.sums, sum_of<double>));
  Logprob* out = p.out + job.out;
  if (threadIdx.x == 0) put(out, token, load(row.logits + token), lse);
  if (job.top == 0) return;
  if (block_reduce(mine, s.counts, sum_of<uint32_t>) > kRoom) {
    cut = find_cut(row, cut, job.top, s);
    mine = 0;
    row.for_each_rank([&](uint64_t rank) { mine += rank >= cut; });
  }
  put_top(row, cut, mine, job.top, lse, s, out + 1);
}

void logprobs(StreamHandle stream, const DeviceLogprobs& logprobs) {
  if (logprobs.num_rows == 0) return;
  launch<logprob_rows>(stream, dim3(logprobs.num_rows), kThreads, sizeof(Shared), logprobs);
}

}  // namespace

extern const LogprobsCuda kLogprobsCuda;
const LogprobsCuda kLogprobsCuda{logprobs};

}  // namespace turbomind::TM_CUDA_NS
