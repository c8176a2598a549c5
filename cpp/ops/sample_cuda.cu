// Exact sampling, one block per row. Weights are exp((logit - max) / T) as 64-bit fixed-point
// numbers, so every sum is exact whatever the order it is taken in: the token depends on the row
// alone, and no vocabulary is sorted. A nucleus is cut by a radix search for the least kept logit;
// of equal logits at the cut those with the lowest ids stay, as on the CPU.
//
// One multiprocessor takes about 64 bytes a cycle out of the second-level cache, 5 us for the 512
// KiB of 128k logits, where 64 KiB are on their way: 16 logits of each thread. A greedy token takes
// one pass, a temperature two, a nucleus six. Computed, not measured.
#include "ops/sample_cuda.h"

#include "cuda/block_scan.h"
#include "cuda/integers.h"
#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = 1024;
constexpr int kPerThread = 4;  // logits of one 16-byte load
constexpr int kTile = kThreads * kPerThread;
constexpr int kTogether = 4;                // loads of a thread under way at once
constexpr int kRegions = kThreads / kWarp;  // a row's parts in order of ids, one of a warp
constexpr float kOne = 1099511627776.0f;    // 2^40: weights below 1e-12 of the likeliest are zero;
                                            // 2^20 tokens of weight one still fit in 64 bits
// The search for a cut: 11, 11 and 10 bits of a logit's key, highest first.
constexpr int kRounds = 3;
constexpr int kBins = 2048;

struct Shared {
  uint64_t mass[kBins];
  uint32_t count[kBins];
  uint64_t region_mass[kRegions];
  uint32_t region_ties[kRegions];
  WarpValues<uint64_t> wide;
  WarpValues<uint32_t> narrow;
  uint64_t found_mass;
  uint32_t found_count;
  uint32_t found_key;
  int32_t found_token;
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

// What is kept: keys above `cut`, and of those equal to it the first `ties` in order of ids.
struct Kept {
  uint32_t cut;
  uint32_t ties;
};

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
  // All logits, by all threads.
  template <typename F>
  TM_DEVICE void for_each_four(const F& f) const {
    for_each_four(static_cast<int>(threadIdx.x) * kPerThread, kTile, vocab, f);
  }

  TM_DEVICE int region_size() const {
    constexpr int kPiece = kWarp * kPerThread;
    return (vocab + kRegions * kPiece - 1) / (kRegions * kPiece) * kPiece;
  }

  TM_DEVICE uint64_t weight(float x) const {
    return static_cast<uint64_t>(expf((x - max) * scale) * kOne);
  }
};

// The likeliest token, the lowest id of equals, with its logit's key above it; 0 when a logit is
// NaN or +inf or none is finite. Also the number of finite ones.
TM_DEVICE uint64_t find_best(const Row& row, Shared& s, uint32_t* finite) {
  float top = -INFINITY;
  uint32_t bad = 0, count = 0;
  int id = 0;
  row.for_each_four([&](int begin, const float (&x)[kPerThread]) {
    for (int i = 0; i < kPerThread; ++i) {
      bad |= !(x[i] < INFINITY);
      count += x[i] > -INFINITY;
      if (x[i] > top) top = x[i], id = begin + i;  // ids rise: the lowest of equals stays
    }
  });
  uint64_t best = count > 0 ? uint64_t{key_of(top)} << 32 | (0xffffffffu - id) : 0;
  best = block_reduce(best, s.wide, maximum);
  bad = block_reduce(bad, s.narrow, [](uint32_t a, uint32_t b) { return a | b; });
  *finite = block_reduce(count, s.narrow, [](uint32_t a, uint32_t b) { return a + b; });
  return bad ? 0 : best;
}

// Adds the row's tokens of keys >= floor and equal to `prefix` above `shift + bits` to the bins.
TM_DEVICE void fill_bins(const Row& row, uint32_t floor, uint32_t prefix, int shift, int bits,
                         Shared& s) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) s.mass[i] = 0, s.count[i] = 0;
  __syncthreads();
  row.for_each_four([&](int, const float (&x)[kPerThread]) {
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t key = key_of(x[i]);
      const bool above = shift + bits == 32 || key >> (shift + bits) == prefix >> (shift + bits);
      if (x[i] == -INFINITY || key < floor || !above) continue;
      const uint32_t bin = key >> shift & ((1u << bits) - 1);
      atomic_add_shared(&s.count[bin], 1u);
      atomic_add_shared(&s.mass[bin], row.weight(x[i]));
    }
  });
  __syncthreads();
}

// Finds, from the highest bin down, the first one at which the mass or the count in front of it
// and its own reach what is wanted. Each thread has two neighbouring bins.
TM_DEVICE void find_bin(uint64_t wanted_mass, uint32_t wanted_count, int bits, Shared& s) {
  const int top = (1 << bits) - 1 - 2 * static_cast<int>(threadIdx.x);
  uint64_t mass[2] = {}, all_mass;
  uint32_t count[2] = {}, all_count;
  for (int i = 0; i < 2; ++i)
    if (top - i >= 0) mass[i] = s.mass[top - i], count[i] = s.count[top - i];
  uint64_t mass_before = block_scan_before(mass[0] + mass[1], s.wide, &all_mass);
  uint32_t count_before = block_scan_before(count[0] + count[1], s.narrow, &all_count);
  for (int i = 0; i < 2; ++i) {
    const bool reached_before = mass_before >= wanted_mass || count_before >= wanted_count;
    const bool reached =
        mass_before + mass[i] >= wanted_mass || count_before + count[i] >= wanted_count;
    if (!reached_before && reached) {
      s.found_key = top - i;
      s.found_mass = mass_before;
      s.found_count = count_before;
    }
    mass_before += mass[i], count_before += count[i];
  }
  __syncthreads();
}

// The fewest likeliest tokens, of those in `from`, whose mass reaches `wanted_mass` or whose count
// reaches `wanted_count`. All of them together do.
TM_DEVICE Kept cut_at(const Row& row, Kept from, uint64_t wanted_mass, uint32_t wanted_count,
                      Shared& s) {
  uint32_t prefix = 0;
  int shift = 32;
  for (int round = 0; round < kRounds; ++round) {
    const int bits = round + 1 < kRounds ? 11 : 10;
    shift -= bits;
    fill_bins(row, from.cut, prefix, shift, bits, s);
    find_bin(wanted_mass, wanted_count, bits, s);
    prefix |= s.found_key << shift;
    wanted_mass -= s.found_mass;
    wanted_count -= s.found_count;
    __syncthreads();  // before the bins are filled again
  }
  // Tokens of one key have one weight.
  const uint64_t each = row.weight(logit_of(prefix));
  uint64_t ties = wanted_count;
  if (each > 0 && wanted_mass / each < ties) ties = (wanted_mass + each - 1) / each;
  if (ties < 1) ties = 1;
  Kept kept{prefix, static_cast<uint32_t>(ties)};
  if (kept.cut == from.cut && kept.ties > from.ties) kept.ties = from.ties;
  return kept;
}

template <typename T>
TM_DEVICE T warp_total(T v) {
  for (int step = kWarp / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step);
  return v;
}

// Mass of what is kept, and per region its mass and the number of ties in front of it.
TM_DEVICE uint64_t weigh(const Row& row, Kept kept, uint32_t floor, Shared& s) {
  uint64_t mass = 0;
  uint32_t ties = 0;
  const int region = warp_index(), begin = region * row.region_size();
  const int end = min(begin + row.region_size(), row.vocab);
  row.for_each_four(begin + lane_index() * kPerThread, kWarp * kPerThread, end,
                    [&](int, const float (&x)[kPerThread]) {
                      for (int i = 0; i < kPerThread; ++i) {
                        const uint32_t key = key_of(x[i]);
                        if (x[i] == -INFINITY) continue;
                        if (key > kept.cut && key >= floor) mass += row.weight(x[i]);
                        ties += key == kept.cut;
                      }
                    });
  mass = warp_total(mass);
  ties = warp_total(ties);
  __syncthreads();  // of an earlier weighing everybody has read
  if (lane_index() == 0) s.region_mass[region] = mass, s.region_ties[region] = ties;
  __syncthreads();
  const uint64_t each = kept.cut >= floor ? row.weight(logit_of(kept.cut)) : 0;
  uint64_t total = 0, mine = 0;
  uint32_t ties_before = 0, mine_before = 0;
  for (int r = 0; r < kRegions; ++r) {
    const uint32_t left = kept.ties > ties_before ? kept.ties - ties_before : 0;
    const uint64_t all = s.region_mass[r] + each * min(s.region_ties[r], left);
    if (r == region) mine = all, mine_before = ties_before;
    total += all;
    ties_before += s.region_ties[r];
  }
  __syncthreads();
  if (lane_index() == 0) s.region_mass[region] = mine, s.region_ties[region] = mine_before;
  __syncthreads();
  return total;
}

// The token at which the mass, in order of ids, first exceeds `target`, which is below the total.
TM_DEVICE int32_t draw(const Row& row, Kept kept, uint32_t floor, uint64_t target, Shared& s) {
  uint64_t tile_before = 0;
  int region = 0;
  while (tile_before + s.region_mass[region] <= target) tile_before += s.region_mass[region++];
  uint32_t ties_before = s.region_ties[region];
  const int end = min((region + 1) * row.region_size(), row.vocab);
  for (int tile = region * row.region_size(); tile < end; tile += kTile) {
    const int begin = tile + static_cast<int>(threadIdx.x) * kPerThread;
    float x[kPerThread];
    row.read(begin, end, x);
    uint32_t tied = 0, all_ties;
    for (int i = 0; i < kPerThread; ++i) tied += x[i] != -INFINITY && key_of(x[i]) == kept.cut;
    uint32_t tie = ties_before + block_scan_before(tied, s.narrow, &all_ties);
    uint64_t weight[kPerThread], mass = 0, all_mass;
    for (int i = 0; i < kPerThread; ++i) {
      const uint32_t key = key_of(x[i]);
      const bool in = x[i] != -INFINITY && key >= floor &&
                      (key > kept.cut || (key == kept.cut && tie < kept.ties));
      tie += x[i] != -INFINITY && key == kept.cut;
      weight[i] = in ? row.weight(x[i]) : 0;
      mass += weight[i];
    }
    uint64_t before = tile_before + block_scan_before(mass, s.wide, &all_mass);
    for (int i = 0; i < kPerThread; ++i) {
      if (before <= target && target < before + weight[i]) s.found_token = begin + i;
      before += weight[i];
    }
    tile_before += all_mass;
    ties_before += all_ties;
    if (target < tile_before) break;
  }
  __syncthreads();
  return s.found_token;
}

// floor(total * uniform / 2^53), below total.
TM_DEVICE uint64_t share_of(uint64_t total, uint64_t uniform) {
  const uint64_t shifted = uniform << 11;
  return multiply_high(total, shifted);
}

TM_DEVICE int32_t sample_row(const DeviceSampleRow& job, Row& row, Shared& s) {
  uint32_t finite;
  const uint64_t best = find_best(row, s, &finite);
  if (best == 0) return -1;
  const int32_t likeliest = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(best));
  if (job.temperature == 0 || job.top_k == 1) return likeliest;
  row.max = logit_of(static_cast<uint32_t>(best >> 32));
  row.scale = 1.0f / (job.temperature > 1e-30f ? job.temperature : 1e-30f);
  Kept kept{0, 0xffffffffu};  // everything
  if (job.top_k > 0 && static_cast<uint32_t>(job.top_k) < finite)
    kept = cut_at(row, kept, ~uint64_t{0}, job.top_k, s);
  if (job.top_p < 1) {
    const uint64_t total = weigh(row, kept, 0, s);
    const uint64_t wanted = static_cast<uint64_t>(static_cast<double>(total) * job.top_p);
    kept = cut_at(row, kept, wanted > 0 ? wanted : 1, 0xffffffffu, s);
  }
  uint32_t floor = 0;
  if (job.min_p > 0) floor = key_of(row.max + job.temperature * logf(job.min_p));
  const uint64_t total = weigh(row, kept, floor, s);
  return draw(row, kept, floor, share_of(total, job.uniform), s);
}

TM_DEVICE DeviceSampleRow load_job(const DeviceSampleRow* p) {
  DeviceSampleRow job;
  job.logits_row = load(&p->logits_row);
  job.out = load(&p->out);
  job.top_k = load(&p->top_k);
  job.temperature = load(&p->temperature);
  job.top_p = load(&p->top_p);
  job.min_p = load(&p->min_p);
  job.uniform = load(&p->uniform);
  return job;
}

TM_KERNEL(kThreads, 1) void sample_rows(const TM_GRID_CONSTANT DeviceSampling p) {
  let_next_start();
  wait_for_previous();
  Shared& s = *shared_memory<Shared>();
  const DeviceSampleRow job = load_job(p.rows + blockIdx.x);
  if (job.logits_row < 0) return;
  Row row{p.logits + job.logits_row * p.stride, p.vocab, 0, 0};
  const int32_t token = sample_row(job, row, s);
  if (threadIdx.x == 0) store(p.tokens + job.out, token);
}

void sample(StreamHandle stream, const DeviceSampling& sampling) {
  if (sampling.num_rows == 0) return;
  launch<sample_rows>(stream, dim3(sampling.num_rows), kThreads, sizeof(Shared), sampling);
}

}  // namespace

extern const SampleCuda kSampleCuda;
const SampleCuda kSampleCuda{sample};

}  // namespace turbomind::TM_CUDA_NS
