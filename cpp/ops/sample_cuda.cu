// Exact sampling. Weights are exp((logit - max) / T) as 64-bit fixed-point numbers, so every sum is
// exact whatever the order it is taken in: the token depends on the row alone, not on the blocks
// that share it, and no vocabulary is sorted. A cut is found by a radix search for the least
// logit of a candidate; of equal logits at the cut those with the lowest ids stay, as on the CPU.
//
// A pass over a row is a kernel: its blocks leave sums in device memory, and the last to arrive
// makes of them what the next pass needs (cuda/last_block.h). Nothing depends on the host between
// two passes. A greedy token takes one pass, a temperature two, a top-k or a nucleus three more.
//
// One multiprocessor takes about 64 bytes a cycle out of the second-level cache, so a row of 128k
// logits, 512 KiB, is 5 us of a block each time, and as much again for the additions to the bins,
// many of which meet in the same bin. Of 32 blocks each has 16 KiB, a quarter of a microsecond,
// and a pass is little more than its start and a few trips to that cache. Computed, not measured.
#include "ops/sample_cuda.h"

#include "core/error.h"
#include "cuda/block_scan.h"
#include "cuda/integers.h"
#include "cuda/kernel.h"
#include "cuda/last_block.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = 1024;
constexpr int kPerThread = 4;  // logits of one 16-byte load
constexpr int kTile = kThreads * kPerThread;
constexpr int kTogether = 2;              // loads of a thread under way at once: 32 KiB of a block
constexpr int kWarps = kThreads / kWarp;  // as many as a row has parts
constexpr float kOne = 1099511627776.0f;  // 2^40: weights below 1e-12 of the likeliest are zero;
                                          // 2^20 tokens of weight one still fit in 64 bits
// The search for a cut: 11, 11 and 10 bits of a logit's key, highest first.
constexpr int kRounds = 3;
static_assert(kWarps == kSampleParts && kSampleBins == 2 * kThreads);

struct SampleLaunch {
  DeviceSampling p;
  int round;     // of a search
  bool by_mass;  // it is that of top-p, else that of top-k
};

// Ascending with the logit; -inf is the lowest, NaN does not come here.
TM_DEVICE uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

TM_DEVICE float logit_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

TM_DEVICE uint64_t maximum(uint64_t a, uint64_t b) {
  return a > b ? a : b;
}

struct Row {
  const float* logits;
  int vocab;
  float max;
  float scale;  // 1 / T

  // Four logits from `begin` on; -inf past the end. Zeros lose their sign: they are equal.
  TM_DEVICE void read(int begin, int end, float (&x)[kPerThread]) const {
    for (int i = 0; i < kPerThread; ++i) x[i] = -INFINITY;
    if (begin + kPerThread <= end) {
      const float4 v = load(reinterpret_cast<const float4*>(logits + begin));
      x[0] = v.x + 0.0f, x[1] = v.y + 0.0f, x[2] = v.z + 0.0f, x[3] = v.w + 0.0f;
    } else {
      for (int i = 0; i < kPerThread && begin + i < end; ++i)
        x[i] = load(logits + begin + i) + 0.0f;
    }
  }

  // f(id, x) for the logits `begin`, `begin` + step, ... below `end`, four at each, several loads
  // under way; x may be -inf past the end.
  template <typename F>
  TM_DEVICE void for_each_four(int begin, int step, int end, const F& f) const {
    for (int at = begin; at < end; at += kTogether * step) {
      float x[kTogether][kPerThread];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) read(at + j * step, end, x[j]);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) f(at + j * step, x[j]);
    }
  }
  TM_DEVICE int part_size() const {
    constexpr int kPiece = kWarp * kPerThread;
    return (vocab + kSampleParts * kPiece - 1) / (kSampleParts * kPiece) * kPiece;
  }
  // Ids [begin, end) of this block, by all its threads.
  template <typename F>
  TM_DEVICE void for_each_four(const F& f) const {
    const int share = part_size() * (kSampleParts / static_cast<int>(gridDim.y));
    const int begin = static_cast<int>(blockIdx.y) * share;
    for_each_four(begin + static_cast<int>(threadIdx.x) * kPerThread, kTile,
                  min(begin + share, vocab), f);
  }

  TM_DEVICE uint64_t weight(float x) const {
    return static_cast<uint64_t>(expf((x - max) * scale) * kOne);
  }
};

// ---- What passes leave each other.

// The tokens that stay: keys above `cut`, and of those equal to it the first `ties` by id.
struct Candidates {
  uint32_t cut;
  uint32_t ties;
};

TM_DEVICE Candidates load_candidates(const SampleScratch& t) {
  return {load(&t.cut), load(&t.ties)};
}

TM_DEVICE SampleRow load_job(const DeviceSampling& p) {
  const SampleRow* from = p.rows + blockIdx.x;
  SampleRow job;
  job.logits_row = load(&from->logits_row);
  job.out = load(&from->out);
  job.top_k = load(&from->top_k);
  job.temperature = load(&from->temperature);
  job.top_p = load(&from->top_p);
  job.min_p = load(&from->min_p);
  job.uniform = load(&from->uniform);
  return job;
}

TM_DEVICE Row row_of(const DeviceSampling& p, const SampleRow& job, uint32_t max_key) {
  const float temperature = job.temperature > 1e-30f ? job.temperature : 1e-30f;
  return {p.logits + job.logits_row * p.stride, p.vocab, logit_of(max_key), 1.0f / temperature};
}

TM_DEVICE bool is_last(SampleScratch& t, bool* flag) {
  return is_last_block(&t.arrived, gridDim.y, flag);
}

// ---- The first pass: the likeliest token.

struct BestShared {
  WarpValues<uint64_t> wide;
  WarpValues<uint32_t> narrow;
  bool last;
};

struct Best {
  uint64_t key = 0;  // above the lowest of its ids, inverted; 0: no finite logit
  uint32_t finite = 0;
  uint32_t bad = 0;  // whether a logit is NaN or +inf
};

TM_DEVICE Best reduce_best(Best b, BestShared& s) {
  b.key = block_reduce(b.key, s.wide, maximum);
  b.bad = block_reduce(b.bad, s.narrow, [](uint32_t x, uint32_t y) { return x | y; });
  b.finite = block_reduce(b.finite, s.narrow, [](uint32_t x, uint32_t y) { return x + y; });
  return b;
}

TM_DEVICE Best find_best(const Row& row) {
  Best b;
  float top = -INFINITY;
  int id = 0;
  row.for_each_four([&](int begin, const float (&x)[kPerThread]) {
    for (int i = 0; i < kPerThread; ++i) {
      b.bad |= !(x[i] < INFINITY);
      b.finite += x[i] > -INFINITY;
      if (x[i] > top) top = x[i], id = begin + i;  // ids rise: the lowest of equals stays
    }
  });
  if (b.finite > 0) b.key = uint64_t{key_of(top)} << 32 | (0xffffffffu - id);
  return b;
}

TM_DEVICE bool is_greedy(const SampleRow& job) {
  return job.temperature == 0 || job.top_k == 1;
}

// The token where nothing else is to be known, else the state that the other passes begin with.
TM_DEVICE void begin_row(const DeviceSampling& p, const SampleRow& job, const Best& best,
                         SampleScratch& t) {
  const bool none = best.bad != 0 || best.key == 0, done = none || is_greedy(job);
  if (done)
    store(p.tokens + job.out, none ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(best.key)));
  store(&t.max_key, done ? 0u : static_cast<uint32_t>(best.key >> 32));
  store(&t.finite, best.finite);
  store(&t.cut, 0u);  // all tokens stay
  store(&t.ties, 0xffffffffu);
  store(&t.tied, 0u);
}

TM_KERNEL(kThreads, 1) void sample_best(const TM_GRID_CONSTANT SampleLaunch w) {
  let_next_start();
  wait_for_previous();
  BestShared& s = *shared_memory<BestShared>();
  const SampleRow job = load_job(w.p);
  if (job.logits_row < 0) return;
  SampleScratch& t = w.p.scratch[blockIdx.x];
  const Best mine = reduce_best(find_best(row_of(w.p, job, 0)), s);
  if (threadIdx.x == 0) {
    store(&t.part_keys[blockIdx.y], mine.key);
    store(&t.part_counts[blockIdx.y], mine.finite);
    store(&t.part_bad[blockIdx.y], mine.bad);
  }
  if (!is_last(t, &s.last)) return;
  Best all;
  if (threadIdx.x < gridDim.y) {
    all.key = load(&t.part_keys[threadIdx.x]);
    all.finite = load(&t.part_counts[threadIdx.x]);
    all.bad = load(&t.part_bad[threadIdx.x]);
  }
  all = reduce_best(all, s);
  if (threadIdx.x == 0) begin_row(w.p, job, all, t);
}

// ---- Three passes: the search for a cut. Bins hold mass, or the number of tokens.

struct CutShared {
  uint64_t bins[kSampleBins];
  WarpValues<uint64_t> wide;
  uint64_t found_before, found_amount;
  uint32_t found;
  bool last;
};

TM_DEVICE int bits_of(int round) {
  return round + 1 < kRounds ? 11 : 10;
}
TM_DEVICE int shift_of(int round) {
  return round == 0 ? 21 : round == 1 ? 10 : 0;
}

TM_DEVICE bool wants_cut(const SampleLaunch& w, const SampleRow& job, uint32_t finite) {
  return w.by_mass ? job.top_p < 1 : job.top_k > 0 && static_cast<uint32_t>(job.top_k) < finite;
}

// Adds this block's tokens of keys >= floor and equal to `prefix` above the round's bits.
TM_DEVICE void fill_bins(const SampleLaunch& w, const Row& row, uint32_t floor, uint32_t prefix,
                         CutShared& s) {
  const int shift = shift_of(w.round), bits = bits_of(w.round);
  for (int i = threadIdx.x; i < kSampleBins; i += kThreads) s.bins[i] = 0;
  __syncthreads();
  row.for_each_four([&](int, const float (&x)[kPerThread]) {
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t key = key_of(x[i]);
      const bool above = w.round == 0 || key >> (shift + bits) == prefix >> (shift + bits);
      if (x[i] == -INFINITY || key < floor || !above) continue;
      const uint64_t amount = w.by_mass ? row.weight(x[i]) : 1;
      if (amount != 0) atomic_add_shared(&s.bins[key >> shift & ((1u << bits) - 1)], amount);
    }
  });
  __syncthreads();
}

// Brings the bins of all blocks to the last one's, and those between blocks back to zero.
TM_DEVICE bool gather_bins(SampleScratch& t, CutShared& s) {
  if (gridDim.y == 1) return true;
  for (int i = threadIdx.x; i < kSampleBins; i += kThreads)
    if (s.bins[i] != 0) atomic_add_device(&t.bins[i], s.bins[i]);
  if (!is_last(t, &s.last)) return false;
  for (int i = threadIdx.x; i < kSampleBins; i += kThreads) {
    s.bins[i] = load(&t.bins[i]);
    if (s.bins[i] != 0) store(&t.bins[i], uint64_t{0});
  }
  __syncthreads();
  return true;
}

// Returns the target of the first round, of `total` in the bins.
TM_DEVICE uint64_t first_wanted(const SampleLaunch& w, const SampleRow& job, const Row& row,
                                const SampleScratch& t, Candidates from, uint64_t total) {
  if (!w.by_mass) return static_cast<uint64_t>(job.top_k);
  const uint32_t tied = load(&t.tied);  // of which a top-k left some
  if (tied > from.ties) total -= row.weight(logit_of(from.cut)) * (tied - from.ties);
  const uint64_t wanted = static_cast<uint64_t>(static_cast<double>(total) * job.top_p);
  return wanted > 0 ? wanted : 1;
}

// Finds, from the highest bin down, the first one at which what lies in front of it and its own
// reach `wanted`. Each thread has two neighbouring bins, `before` of all in front of them.
TM_DEVICE void find_bin(int top, const uint64_t (&amount)[2], uint64_t before, uint64_t wanted,
                        CutShared& s) {
  for (int i = 0; i < 2; ++i) {
    if (before < wanted && before + amount[i] >= wanted) {
      s.found = top - i;
      s.found_before = before;
      s.found_amount = amount[i];
    }
    before += amount[i];
  }
  __syncthreads();
}

// The whole key is found, and `wanted` is left of it.
TM_DEVICE void store_cut(const SampleLaunch& w, const Row& row, Candidates from, uint32_t key,
                         uint64_t wanted, uint64_t amount, SampleScratch& t) {
  uint64_t ties = wanted;
  if (w.by_mass) {  // tokens of one key have one weight
    const uint64_t each = row.weight(logit_of(key));
    ties = (wanted + each - 1) / each;
    if (key == from.cut && ties > from.ties) ties = from.ties;
  } else {
    store(&t.tied, static_cast<uint32_t>(amount));
  }
  store(&t.cut, key);
  store(&t.ties, static_cast<uint32_t>(ties));
}

// The fewest likeliest tokens, of those that are left, whose mass or count reaches the target.
// All of them together do.
TM_KERNEL(kThreads, 1) void sample_cut(const TM_GRID_CONSTANT SampleLaunch w) {
  let_next_start();
  wait_for_previous();
  CutShared& s = *shared_memory<CutShared>();
  const SampleRow job = load_job(w.p);
  if (job.logits_row < 0) return;
  SampleScratch& t = w.p.scratch[blockIdx.x];
  const uint32_t max_key = load(&t.max_key);
  if (max_key == 0 || !wants_cut(w, job, load(&t.finite))) return;
  const Row row = row_of(w.p, job, max_key);
  const Candidates from = load_candidates(t);
  const uint32_t prefix = w.round == 0 ? 0 : load(&t.prefix);
  fill_bins(w, row, from.cut, prefix, s);
  if (!gather_bins(t, s)) return;

  const int top = (1 << bits_of(w.round)) - 1 - 2 * static_cast<int>(threadIdx.x);
  uint64_t amount[2] = {}, total;
  for (int i = 0; i < 2; ++i)
    if (top - i >= 0) amount[i] = s.bins[top - i];
  const uint64_t before = block_scan_before(amount[0] + amount[1], s.wide, &total);
  const uint64_t wanted =
      w.round == 0 ? first_wanted(w, job, row, t, from, total) : load(&t.wanted);
  find_bin(top, amount, before, wanted, s);
  if (threadIdx.x != 0) return;
  const uint32_t key = prefix | s.found << shift_of(w.round);
  store(&t.prefix, key);
  store(&t.wanted, wanted - s.found_before);
  if (w.round + 1 == kRounds)
    store_cut(w, row, from, key, wanted - s.found_before, s.found_amount, t);
}

// ---- The last pass: sampling.

struct PickShared {
  uint64_t warp_mass[kWarps];
  uint32_t warp_ties[kWarps];
  uint64_t part_mass[kSampleParts];
  uint32_t part_ties[kSampleParts];
  WarpValues<uint64_t> wide;
  WarpValues<uint32_t> narrow;
  int32_t token;
  bool last;
};

template <typename T>
TM_DEVICE T warp_total(T v) {
  for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}

// Leaves, per part of this block, the mass above the cut and the number of tokens at it. A part is
// taken by as many warps as blocks share the row.
TM_DEVICE void weigh_parts(const Row& row, Candidates candidates, uint32_t floor, SampleScratch& t,
                           PickShared& s) {
  const int spread = static_cast<int>(gridDim.y), parts = kSampleParts / spread;
  const int first_part = static_cast<int>(blockIdx.y) * parts, warp = warp_index();
  const int begin = (first_part + warp / spread) * row.part_size();
  const int offset = (warp % spread * kWarp + lane_index()) * kPerThread;
  uint64_t mass = 0;
  uint32_t ties = 0;
  row.for_each_four(begin + offset, spread * kWarp * kPerThread,
                    min(begin + row.part_size(), row.vocab),
                    [&](int, const float (&x)[kPerThread]) {
                      for (int i = 0; i < kPerThread; ++i) {
                        const uint32_t key = key_of(x[i]);
                        if (x[i] == -INFINITY) continue;
                        if (key > candidates.cut && key >= floor) mass += row.weight(x[i]);
                        ties += key == candidates.cut;
                      }
                    });
  mass = warp_total(mass);
  ties = warp_total(ties);
  if (lane_index() == 0) s.warp_mass[warp] = mass, s.warp_ties[warp] = ties;
  __syncthreads();
  const int part = static_cast<int>(threadIdx.x);
  if (part >= parts) return;
  mass = 0, ties = 0;
  for (int i = part * spread; i < (part + 1) * spread; ++i)
    mass += s.warp_mass[i], ties += s.warp_ties[i];
  store(&t.part_keys[first_part + part], mass);
  store(&t.part_counts[first_part + part], ties);
}

// Position of a scan: ids from `begin` on, after so much mass and so many tokens of the cut's key.
struct PickAt {
  int part = 0;
  uint64_t mass = 0;
  uint32_t ties = 0;
};

// Goes over the parts as long as f(mass up to the end of the next one).
template <typename F>
TM_DEVICE PickAt pass_parts(const PickShared& s, Candidates candidates, uint64_t each, const F& f) {
  PickAt at;
#pragma unroll 1  // 32 of them take more registers than there are
  for (; at.part < kSampleParts; ++at.part) {
    const uint32_t left = candidates.ties > at.ties ? candidates.ties - at.ties : 0;
    const uint64_t after = at.mass + s.part_mass[at.part] + each * min(s.part_ties[at.part], left);
    if (!f(after)) break;
    at.mass = after;
    at.ties += s.part_ties[at.part];
  }
  return at;
}

// The token of a part at which the mass, in order of ids, first exceeds `target`.
TM_DEVICE int32_t pick(const Row& row, Candidates candidates, uint32_t floor, uint64_t target,
                       PickAt at, PickShared& s) {
  const int end = min((at.part + 1) * row.part_size(), row.vocab);
  for (int tile = at.part * row.part_size(); tile < end; tile += kTile) {
    const int begin = tile + static_cast<int>(threadIdx.x) * kPerThread;
    float x[kPerThread];
    row.read(begin, end, x);
    uint32_t tied = 0, all_ties;
    for (int i = 0; i < kPerThread; ++i)
      tied += x[i] != -INFINITY && key_of(x[i]) == candidates.cut;
    uint32_t tie = at.ties + block_scan_before(tied, s.narrow, &all_ties);
    uint64_t weight[kPerThread], mass = 0, all_mass;
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t key = key_of(x[i]);
      const bool in = x[i] != -INFINITY && key >= floor &&
                      (key > candidates.cut || (key == candidates.cut && tie < candidates.ties));
      tie += x[i] != -INFINITY && key == candidates.cut;
      weight[i] = in ? row.weight(x[i]) : 0;
      mass += weight[i];
    }
    uint64_t before = at.mass + block_scan_before(mass, s.wide, &all_mass);
    for (int i = 0; i < kPerThread; ++i) {
      if (before <= target && target < before + weight[i]) s.token = begin + i;
      before += weight[i];
    }
    at.mass += all_mass;
    at.ties += all_ties;
    if (target < at.mass) break;
  }
  __syncthreads();
  return s.token;
}

// floor(total * uniform / 2^53), below total.
TM_DEVICE uint64_t share_of(uint64_t total, uint64_t uniform) {
  return multiply_high(total, uniform << 11);
}

TM_KERNEL(kThreads, 1) void sample_pick(const TM_GRID_CONSTANT SampleLaunch w) {
  let_next_start();
  wait_for_previous();
  PickShared& s = *shared_memory<PickShared>();
  const SampleRow job = load_job(w.p);
  if (job.logits_row < 0) return;
  SampleScratch& t = w.p.scratch[blockIdx.x];
  const uint32_t max_key = load(&t.max_key);
  if (max_key == 0) return;
  const Row row = row_of(w.p, job, max_key);
  const Candidates candidates = load_candidates(t);
  const uint32_t floor = job.min_p > 0 ? key_of(row.max + job.temperature * logf(job.min_p)) : 0;
  weigh_parts(row, candidates, floor, t, s);
  if (!is_last(t, &s.last)) return;

  if (threadIdx.x < kSampleParts) {
    s.part_mass[threadIdx.x] = load(&t.part_keys[threadIdx.x]);
    s.part_ties[threadIdx.x] = load(&t.part_counts[threadIdx.x]);
  }
  __syncthreads();
  const uint64_t each = candidates.cut >= floor ? row.weight(logit_of(candidates.cut)) : 0;
  const uint64_t total = pass_parts(s, candidates, each, [](uint64_t) { return true; }).mass;
  const uint64_t target = share_of(total, job.uniform);
  const PickAt at =
      pass_parts(s, candidates, each, [&](uint64_t after) { return after <= target; });
  const int32_t token = pick(row, candidates, floor, target, at, s);
  if (threadIdx.x == 0) store(w.p.tokens + job.out, token);
}

// ---- The launches.

void check(const DeviceSampling& p) {
  if (p.vocab < 1 || p.vocab > kMaxSampledVocab)
    throw_error(ErrorCode::internal, "sample: got a vocabulary of ", p.vocab, ", expected 1 to ",
                kMaxSampledVocab);
  if (p.spread < 1 || p.spread > kSampleParts || kSampleParts % p.spread != 0)
    throw_error(ErrorCode::internal, "sample: got ", p.spread,
                " blocks a row, expected a power of two up to ", kSampleParts);
}

void sample(StreamHandle stream, const DeviceSampling& p) {
  check(p);
  const dim3 grid(static_cast<unsigned>(p.num_rows), static_cast<unsigned>(p.spread));
  launch<sample_best>(stream, grid, kThreads, sizeof(BestShared), SampleLaunch{p, 0, false});
  if (!p.needs.pick) return;
  const auto cut = [&](bool by_mass) {
    for (int round = 0; round < kRounds; ++round)
      launch<sample_cut>(stream, grid, kThreads, sizeof(CutShared),
                         SampleLaunch{p, round, by_mass});
  };
  if (p.needs.top_k) cut(false);
  if (p.needs.top_p) cut(true);
  launch<sample_pick>(stream, grid, kThreads, sizeof(PickShared), SampleLaunch{p, 0, false});
}

}  // namespace

extern const SampleCuda kSampleCuda;
const SampleCuda kSampleCuda{sample};

}  // namespace turbomind::TM_CUDA_NS
