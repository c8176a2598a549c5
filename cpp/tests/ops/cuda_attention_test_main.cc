// The GPU's attention kernels: against plain loops in double and the CPU's op, then bit for bit
// against themselves with other plans, batches and chunks. In emulation, or with "--gpu" on the
// first real one.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cache/page_codec.h"
#include "core/error.h"
#include "core/memory.h"
#include "cuda/emulator.h"
#include "ops/attention_cuda.h"
#include "ops/rope_kv.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"

namespace turbomind {
namespace {

int failures = 0;

void fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}
#define EXPECT(ok, what) ((ok) ? void() : fail(what))

// Sanitizers see every kind of access in a few cases, and need ten times the time.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kBrief = true;
#else
constexpr bool kBrief = false;
#endif

struct Case {
  DType dtype;
  int heads, kv_heads, k_dim, v_dim, window;
  float softcap;
  bool sinks;

  std::string name() const {
    char s[160];
    std::snprintf(s, sizeof s, "%s heads %d/%d dim %d/%d window %d cap %g%s", dtype_name(dtype),
                  heads, kv_heads, k_dim, v_dim, window, softcap, sinks ? " sinks" : "");
    return s;
  }
};

float widen(DType t, uint16_t bits) {
  return t == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}
uint16_t narrow(DType t, float v) {
  return t == DType::bf16 ? f32_to_bf16(v) : f32_to_f16(v);
}

std::vector<uint16_t> random_bits(DType t, size_t n, uint32_t seed, float scale) {
  std::mt19937 gen(seed + test_seed);
  std::normal_distribution<float> dist(0, scale);
  std::vector<uint16_t> v(n);
  for (uint16_t& x : v) x = narrow(t, dist(gen));
  return v;
}

// Queries [begin, begin + count) of text `who`, as one sequence of a step.
struct Query {
  int who, begin, count;
};

// Overrides of how a plan cuts the work; -1: as planned.
struct Cut {
  int decode_spans = -1, decode_blocks = -1, chunk_spans = -1, tile_warps = -1;
  int tokens = 0;  // of the step, padding included; 0: as many as there are
};

// Bytes a kernel should have loaded for one sequence, and has; partial results and the output.
struct Loaded {
  int64_t kv, queries, indices, kernel;
  int64_t stored, stored_by_kernel;    // by that kernel
  int64_t merged, merged_by_kernel;    // loaded by the merge kernel
  int64_t written, written_by_kernel;  // stored by the merge kernel
};

// Pages, or splits, that queries [begin, end) see any of.
int64_t reach(const AttentionCudaArgs& a, int64_t begin, int64_t end, int unit) {
  const int64_t lo = a.window ? std::max<int64_t>(begin - a.window + 1, 0) : 0;
  return (end - 1) / unit - lo / unit + 1;
}

// A partial result is a value per column and two of the row's state, float32; the merge kernel's
// lanes all read the states, its threads all the sequence's fields.
void count_merge(const AttentionLaunch& w, const HostSeq& s, Loaded& l) {
  const int64_t values = int64_t{4} * w.args.v_dim, heads = w.args.heads;
  const int64_t out = s.q_len * heads * w.args.v_dim * 2;
  const bool decode = s.q_len == 1;
  const int unit = decode && !w.plan.decode_spans ? kSplitTokens : kSpanTokens;
  const auto merge = emulator::counters("merge_attention");
  l.merged_by_kernel = merge.bytes_loaded;
  l.written_by_kernel = merge.bytes_stored;
  if (!decode && !w.plan.chunk_spans) {
    l.stored = out;
    l.merged = l.merged_by_kernel = l.written_by_kernel = 0;  // of padding
    return;
  }
  l.written = out;
  for (int64_t t = 0; t < s.q_len; ++t) {
    const int64_t tile = t / w.plan.tile_tokens * w.plan.tile_tokens;
    const int64_t first = decode ? s.kv_begin : s.kv_begin + tile;
    const int64_t last =
        decode ? s.kv_begin + 1 : s.kv_begin + std::min(s.q_len, tile + w.plan.tile_tokens);
    const int64_t position = s.kv_begin + t;
    l.stored += heads * reach(w.args, first, last, unit) * (values + 8);
    l.merged += heads * reach(w.args, position, position + 1, unit) * (values + 32 * 8);
  }
  l.merged += 128 * 4 * heads * (decode ? 3 + 2 : 4 * s.q_len);  // two sequences of padding
  // Chunks come after decode rows' merge kernel, which found none.
  if (!decode) l.merged += 128 * 4 * heads * 3;
}

// Each of a block's 128 threads reads the sequence's fields and the numbers of the pages.
Loaded count_loads(const AttentionLaunch& w, const HostSeq& s) {
  const bool decode = s.q_len == 1;
  const auto kernel = emulator::counters(decode ? "attend_decode" : "attend_tiles");
  Loaded l{};
  l.kv = attention_kv_bytes(w.args, w.plan, &s, 1);
  l.queries = s.q_len * w.args.heads * w.args.k_dim * 2;
  l.kernel = kernel.bytes_loaded;
  l.stored_by_kernel = kernel.bytes_stored;
  count_merge(w, s, l);
  if (decode) {
    l.queries *= reach(w.args, s.kv_begin, s.kv_begin + 1, kSplitTokens);
    l.indices = kernel.blocks * 128 * 12;
    l.indices += 128 * 4 * w.args.kv_heads * reach(w.args, s.kv_begin, s.kv_begin + 1, 64);
    return l;
  }
  for (int64_t t = 0; t < s.q_len; t += w.plan.tile_tokens) {
    const int64_t end = std::min(s.q_len, t + w.plan.tile_tokens);
    const int64_t pages = reach(w.args, s.kv_begin + t, s.kv_begin + end, 64);
    // A span that is a block of its own loads the queries and one field more.
    const int64_t blocks = w.plan.chunk_spans ? w.plan.chunk_slots : 1;
    const int64_t spans =
        w.plan.chunk_spans ? reach(w.args, s.kv_begin + t, s.kv_begin + end, kSpanTokens) : 1;
    l.indices += 128 * 4 * w.args.kv_heads * (blocks * (4 + w.plan.chunk_spans) + pages);
    l.queries += (spans - 1) * (end - t) * w.args.heads * w.args.k_dim * 2;
  }
  return l;
}

class Bench {
 public:
  Bench(const Case& c, const std::vector<int>& lengths) : c_(c), lengths_(lengths) {
    const size_t k_bytes = size_t{2} * kPageTokens * c.kv_heads * c.k_dim;
    page_bytes_ = kOffset + 2 * size_t{kPageTokens} * c.kv_heads * (c.k_dim + c.v_dim) + 64;
    pages_.base = nullptr;
    pages_.page_bytes = static_cast<int64_t>(page_bytes_);
    pages_.k_offset = kOffset;
    pages_.v_offset = static_cast<int64_t>(kOffset + k_bytes);
    std::vector<int32_t> ids;
    for (int n : lengths)
      for (int p = 0; p * kPageTokens < n; ++p) ids.push_back(static_cast<int32_t>(ids.size() + 1));
    std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
    memory_ = SharedVector<uint8_t>((ids.size() + 1) * page_bytes_, 0xff);  // NaN in every element
    pages_.base = memory_.data();
    for (size_t i = 0, next = 0; i < lengths.size(); ++i) {
      const int pages = (lengths[i] + kPageTokens - 1) / kPageTokens;
      tables_.emplace_back(ids.begin() + next, ids.begin() + next + pages);
      next += pages;
      const uint32_t seed = static_cast<uint32_t>(100 * i);
      q_.push_back(random_bits(c.dtype, size_t(lengths[i]) * c.heads * c.k_dim, seed + 1, 1.5f));
      k_.push_back(random_bits(c.dtype, size_t(lengths[i]) * c.kv_heads * c.k_dim, seed + 2, 1));
      v_.push_back(random_bits(c.dtype, size_t(lengths[i]) * c.kv_heads * c.v_dim, seed + 3, 1));
      write_pages(i);
    }
    std::mt19937 gen(9 + test_seed);
    std::normal_distribution<float> dist(0, 2);
    for (int h = 0; h < c.heads; ++h) sinks_.push_back(dist(gen));
  }

  int row_width() const { return c_.heads * c_.v_dim; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(c_.k_dim)); }

  // out [tokens, heads * v_dim] of a step; rows of no sequence stay poisoned. In memory the rows
  // have padding and something behind it.
  SharedVector<uint16_t> run(const std::vector<Query>& step, const Cut& cut = {},
                             Loaded* loaded = nullptr) const;
  void check(const std::vector<Query>& step, const SharedVector<uint16_t>& out) const;
  void check_against_cpu(const std::vector<Query>& step, const SharedVector<uint16_t>& out) const;

 private:
  static constexpr size_t kOffset = 128;

  // Elements of one layer's page in canonical order, [K|V][head][token][dim].
  void write_pages(size_t who) {
    for (int t = 0; t < lengths_[who]; ++t) {
      uint8_t* page = memory_.data() + tables_[who][t / kPageTokens] * page_bytes_ + kOffset;
      uint16_t* k = reinterpret_cast<uint16_t*>(page);
      uint16_t* v = k + c_.kv_heads * kPageTokens * c_.k_dim;
      for (int h = 0; h < c_.kv_heads; ++h) {
        const size_t at = h * kPageTokens + t % kPageTokens, row = size_t(t) * c_.kv_heads + h;
        std::copy_n(k_[who].data() + row * c_.k_dim, c_.k_dim, k + at * c_.k_dim);
        std::copy_n(v_[who].data() + row * c_.v_dim, c_.v_dim, v + at * c_.v_dim);
      }
    }
  }

  int zero_end() const { return static_cast<int>(padded_cols(row_width())); }
  int out_stride() const { return zero_end() + 2; }
  SharedVector<uint16_t> take_rows(const SharedVector<uint16_t>& out, int tokens) const;
  std::vector<double> reference(int who, int t, int h, double* size) const;

  Case c_;
  std::vector<int> lengths_;
  size_t page_bytes_ = 0;
  SharedVector<uint8_t> memory_;
  CudaPages pages_{};
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::vector<uint16_t>> q_, k_, v_;  // per text: [token][head][dim]
  SharedVector<float> sinks_;
};

SharedVector<uint16_t> Bench::run(const std::vector<Query>& step, const Cut& cut,
                                  Loaded* loaded) const {
  int tokens = 0;
  int64_t most_keys = 0, most_pages = 1;
  for (const Query& s : step) {
    tokens += s.count;
    most_keys = std::max<int64_t>(most_keys, s.begin + s.count);
    most_pages = std::max<int64_t>(most_pages, static_cast<int64_t>(tables_[s.who].size()));
  }
  const int real_tokens = tokens;
  tokens = std::max(tokens, cut.tokens);
  // Two sequences of padding: one before the others, one after them.
  const int num_seqs = static_cast<int>(step.size()) + 2;
  SharedVector<int32_t> q_begin(num_seqs), q_len(num_seqs), kv_begin(num_seqs, 1 << 20);
  SharedVector<int32_t> table(num_seqs * most_pages, -1), seq_of_token(tokens, num_seqs - 1);
  SharedVector<uint16_t> q(size_t(tokens) * c_.heads * c_.k_dim, 0xffff);
  std::vector<HostSeq> host;
  for (int s = 0, row = 0; s + 2 < num_seqs; ++s) {
    const Query& from = step[s];
    q_begin[s + 1] = row, q_len[s + 1] = from.count, kv_begin[s + 1] = from.begin;
    host.push_back({row, from.count, from.begin});
    const int lowest = c_.window ? std::max(0, from.begin - c_.window + 1) : 0;
    for (size_t p = 0; p < tables_[from.who].size(); ++p) {
      const bool reached = static_cast<int>(p) >= lowest / kPageTokens &&
                           static_cast<int>(p) * kPageTokens < from.begin + from.count;
      table[(s + 1) * most_pages + p] = reached ? tables_[from.who][p] : -1;
    }
    const size_t width = size_t(c_.heads) * c_.k_dim;
    std::copy_n(q_[from.who].data() + from.begin * width, from.count * width,
                q.data() + row * width);
    for (int i = 0; i < from.count; ++i) seq_of_token[row++] = s + 1;
  }

  AttentionLaunch w{};
  SharedVector<uint16_t> out(size_t(tokens) * out_stride(), 0xffff);
  w.args = {c_.dtype,
            q.data(),
            out.data(),
            pages_,
            {q_begin.data(), q_len.data(), kv_begin.data(), table.data(), seq_of_token.data(),
             num_seqs, static_cast<int>(most_pages), tokens},
            c_.heads,
            c_.kv_heads,
            c_.k_dim,
            c_.v_dim,
            scale(),
            c_.softcap,
            c_.window,
            c_.sinks ? sinks_.data() : nullptr,
            nullptr,
            out_stride(),
            zero_end()};
  AttentionBounds bounds{num_seqs, tokens, most_keys};
  GpuLimits limits{132, shared_per_block()};
  if (cut.chunk_spans == 0) limits.multiprocessors = 1;  // which two blocks fill
  if (cut.tile_warps == 2) limits.shared_bytes = 99 << 10;
  w.plan = plan_attention(w.args, bounds, limits);
  if (cut.decode_spans >= 0) {
    w.plan.decode_spans = cut.decode_spans;
    w.plan.decode_slots =
        static_cast<int>(most_keys / (cut.decode_spans ? kSpanTokens : kSplitTokens) + 1);
    w.plan.decode_blocks = w.plan.decode_slots;
  }
  if (cut.decode_blocks >= 0) w.plan.decode_blocks = cut.decode_blocks;
  if (cut.decode_spans >= 0 || cut.decode_blocks >= 0) {
    w.plan.decode_shared_bytes += (4 - w.plan.decode_stages) * (16 << 10);
    w.plan.decode_stages = 4;
  }
  if (cut.chunk_spans >= 0)
    EXPECT(w.plan.chunk_spans == cut.chunk_spans, c_.name() + ": not the plan that was meant");
  const size_t rows = size_t(std::max(tokens, num_seqs)) * c_.heads;
  const size_t slots = std::max(w.plan.decode_slots, w.plan.chunk_slots);
  SharedVector<float> workspace(std::max(w.plan.workspace_bytes / 4,
                                         cut.decode_spans >= 0 ? rows * slots * (c_.v_dim + 2) : 0),
                                NAN);
  w.args.workspace = workspace.data();
  emulator::reset_counters();
  attention(kind(), nullptr, w);
  finish_kernels();
  if (loaded) *loaded = count_loads(w, host[0]);
  return take_rows(out, real_tokens);
}

// The rows without their padding, which is zero in the first `tokens` of them. The rest is as
// before.
SharedVector<uint16_t> Bench::take_rows(const SharedVector<uint16_t>& out, int tokens) const {
  SharedVector<uint16_t> rows;
  for (size_t at = 0, row = 0; at < out.size(); at += out_stride(), ++row) {
    const uint16_t* from = out.data() + at;
    rows.insert(rows.end(), from, from + row_width());
    for (int i = row_width(); i < out_stride(); ++i) {
      const bool zero = i < zero_end() && row < static_cast<size_t>(tokens);
      EXPECT(from[i] == (zero ? 0 : 0xffff), c_.name() + ": column " + std::to_string(i) +
                                                 " of row " + std::to_string(row) + " is " +
                                                 std::to_string(from[i]));
    }
  }
  return rows;
}

// Row t of head h; `size` [v_dim]: the same with the magnitudes of V.
std::vector<double> Bench::reference(int who, int t, int h, double* size) const {
  const int kv = h / (c_.heads / c_.kv_heads),
            first = c_.window ? std::max(0, t - c_.window + 1) : 0;
  const uint16_t* q = q_[who].data() + (size_t(t) * c_.heads + h) * c_.k_dim;
  std::vector<double> s(t + 1), out(c_.v_dim, 0.0);
  std::fill_n(size, c_.v_dim, 0.0);
  double top = c_.sinks ? sinks_[h] : -1e300;
  for (int j = first; j <= t; ++j) {
    const uint16_t* k = k_[who].data() + (size_t(j) * c_.kv_heads + kv) * c_.k_dim;
    for (int d = 0; d < c_.k_dim; ++d)
      s[j] += static_cast<double>(widen(c_.dtype, q[d])) * widen(c_.dtype, k[d]);
    s[j] *= scale();
    if (c_.softcap > 0) s[j] = c_.softcap * std::tanh(s[j] / c_.softcap);
    top = std::max(top, s[j]);
  }
  double sum = c_.sinks ? std::exp(sinks_[h] - top) : 0;
  for (int j = first; j <= t; ++j) {
    const uint16_t* v = v_[who].data() + (size_t(j) * c_.kv_heads + kv) * c_.v_dim;
    const double weight = std::exp(s[j] - top);
    sum += weight;
    for (int d = 0; d < c_.v_dim; ++d) {
      const double x = weight * widen(c_.dtype, v[d]);
      out[d] += x;
      size[d] += std::abs(x);
    }
  }
  for (int d = 0; d < c_.v_dim; ++d) out[d] /= sum, size[d] /= sum;
  return out;
}

// The result is rounded to 16 bits: half a unit in the last place. So is each weight; those errors
// mostly cancel, and half as much again of what the magnitudes add up to covers them.
void Bench::check(const std::vector<Query>& step, const SharedVector<uint16_t>& out) const {
  const double half_unit = c_.dtype == DType::bf16 ? 1.0 / 256 : 1.0 / 2048;
  std::vector<double> size(c_.v_dim);
  size_t row = 0;
  for (const Query& s : step) {
    for (int i = 0; i < s.count; ++i, ++row) {
      for (int h = 0; h < c_.heads; ++h) {
        if (s.count > 20 && (i + h) % 5 != 0 && i + 1 != s.count) continue;  // a sample is enough
        const std::vector<double> want = reference(s.who, s.begin + i, h, size.data());
        for (int d = 0; d < c_.v_dim; ++d) {
          const double got = widen(c_.dtype, out[(row * c_.heads + h) * c_.v_dim + d]);
          const double bound = (1.5 * half_unit + 2e-5) * size[d] + 1e-6;
          EXPECT(std::abs(got - want[d]) <= bound,
                 c_.name() + ": token " + std::to_string(s.begin + i) + " head " +
                     std::to_string(h) + " gives " + std::to_string(got) + ", not " +
                     std::to_string(want[d]));
        }
      }
    }
  }
  for (size_t i = row * row_width(); i < out.size(); ++i)
    EXPECT(out[i] == 0xffff, c_.name() + ": padding was written");
}

// The same step by the CPU's op, from pages that went through the stored order.
void Bench::check_against_cpu(const std::vector<Query>& step,
                              const SharedVector<uint16_t>& out) const {
  ThreadPool pool(1);
  Profiler profiler;
  Context ctx{pool, best_isa(), profiler};
  KvLayout layout;
  layout.kv_heads = c_.kv_heads, layout.k_dim = c_.k_dim, layout.v_dim = c_.v_dim;
  const PageCodec codec({layout});
  HugeBuffer memory(memory_.size() / page_bytes_ * layout.layer_bytes());
  for (size_t who = 0; who < tables_.size(); ++who)
    for (size_t p = 0; p < tables_[who].size(); ++p) {
      const int id = tables_[who][p];
      const int count = std::min(kPageTokens, lengths_[who] - static_cast<int>(p) * kPageTokens);
      codec.write(memory.data() + id * layout.layer_bytes(), count,
                  memory_.data() + id * page_bytes_ + kOffset, kPageTokens);
    }
  AttentionShape shape;
  shape.heads = c_.heads, shape.kv_heads = c_.kv_heads, shape.k_dim = c_.k_dim;
  shape.v_dim = c_.v_dim, shape.scale = scale(), shape.softcap = c_.softcap;
  shape.window = c_.window, shape.sinks = c_.sinks ? sinks_.data() : nullptr;
  std::vector<AttentionSeq> seqs;
  int64_t rows = 0;
  for (const Query& s : step) {
    seqs.push_back({rows, s.count, s.begin, tables_[s.who].data()});
    rows += s.count;
  }
  const DType q_dtype = attention_q_dtype(ctx, DType::bf16);
  const int64_t k_width = layout.k_width(), q_cols = c_.heads * k_width;
  std::vector<float> q(rows * q_cols), want(rows * padded_cols(row_width()));
  const Mat q_mat{q.data(), q_dtype, rows, q_cols, q_cols};
  int64_t row = 0;
  for (const Query& s : step)
    for (int i = 0; i < s.count; ++i, ++row)
      for (int h = 0; h < c_.heads; ++h)
        for (int d = 0; d < c_.k_dim; ++d) {
          const uint16_t bits = q_[s.who][(size_t(s.begin + i) * c_.heads + h) * c_.k_dim + d];
          if (q_dtype == DType::bf16)
            q_mat.u16(row)[h * k_width + d] = bits;
          else
            q_mat.f32(row)[h * k_width + d] = bf16_to_f32(bits);
        }
  const Mat out_mat{want.data(), DType::f32, rows, row_width(), padded_cols(row_width())};
  AttentionScratch scratch;
  attention(ctx, shape, layout, {memory.data(), layout.layer_bytes()},
            {seqs.data(), static_cast<int64_t>(seqs.size())}, q_mat, out_mat, scratch);
  double difference = 0, size = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int i = 0; i < row_width(); ++i) {
      const double a = out_mat.f32(r)[i], b = bf16_to_f32(out[r * row_width() + i]);
      difference += (a - b) * (a - b);
      size += a * a;
    }
  EXPECT(difference <= 4e-3 * 4e-3 * size, c_.name() + ": differs from the CPU's op by " +
                                               std::to_string(std::sqrt(difference / size)));
}

// Rows of `a` and `b` that are the same queries have the same bits.
void expect_same(const Case& c, const std::string& what, const std::vector<Query>& step_a,
                 const SharedVector<uint16_t>& a, const std::vector<Query>& step_b,
                 const SharedVector<uint16_t>& b) {
  const size_t width = size_t(c.heads) * c.v_dim;
  size_t row_a = 0;
  for (const Query& s : step_a) {
    size_t row_b = 0;
    for (const Query& o : step_b) {
      for (int i = 0; i < o.count; ++i) {
        const int at = o.begin + i - s.begin;
        if (o.who == s.who && at >= 0 && at < s.count)
          EXPECT(std::memcmp(&a[(row_a + at) * width], &b[(row_b + i) * width], 2 * width) == 0,
                 c.name() + ": " + what + " changes bits of query " + std::to_string(o.begin + i));
      }
      row_b += o.count;
    }
    row_a += s.count;
  }
}

// Chunks and decode rows of texts that begin, end and go on at every side of a page.
void check_case(const Case& c, bool all_cuts) {
  const Bench bench(c, {130, 18, 65, 191, 517, 65, 128, 501, 1});
  const std::vector<Query> step{{0, 0, 130}, {1, 1, 17},  {2, 63, 2},  {3, 127, 64}, {4, 500, 17},
                                {5, 64, 1},  {6, 127, 1}, {7, 500, 1}, {8, 0, 1}};
  const SharedVector<uint16_t> out = bench.run(step, {.tokens = 240});
  bench.check(step, out);
  if (c.dtype == DType::bf16) bench.check_against_cpu(step, out);
  // Rows of the chunks, each as a decode row; decode rows in chunks.
  const std::vector<Query> rows{{0, 0, 1},   {0, 77, 1},  {0, 129, 1}, {1, 17, 1}, {2, 64, 1},
                                {3, 128, 1}, {3, 190, 1}, {4, 511, 1}, {4, 516, 1}};
  expect_same(c, "being a decode row", step, out, rows, bench.run(rows));
  const std::vector<Query> chunks{{7, 490, 11}, {6, 126, 2}, {5, 60, 5}, {0, 100, 30}};
  expect_same(c, "another chunk", step, out, chunks, bench.run(chunks));
  if (!all_cuts) return;
  expect_same(c, "fewer warps", step, out, step, bench.run(step, {.tile_warps = 2}));
  expect_same(c, "one block a row", step, out, step, bench.run(step, {.decode_blocks = 1}));
  expect_same(c, "spans in a block", step, out, step, bench.run(step, {.decode_spans = 1}));
  const std::vector<Query> alone{{7, 500, 1}};
  expect_same(c, "being alone", step, out, alone, bench.run(alone));
}

// A past of several spans, in every way to cut it.
void check_long(const Case& c, int length) {
  const Bench bench(c, {length});
  const std::vector<Query> step{
      {0, length - 30, 6}, {0, length - 10, 1}, {0, length - 25, 1}, {0, 1030, 3}};
  const SharedVector<uint16_t> out = bench.run(step, {.decode_spans = 0, .chunk_spans = 1});
  bench.check(step, out);
  expect_same(c, "being a decode row", step, out, step, out);
  for (const int spans : {0, 1})
    for (const int blocks : {1, 2, 3})
      expect_same(c, "the cut of decode", step, out, step,
                  bench.run(step, {.decode_spans = spans, .decode_blocks = blocks}));
  expect_same(c, "spans in a block", step, out, step,
              bench.run(step, {.chunk_spans = 0, .tokens = 130}));
  expect_same(c, "fewer warps", step, out, step,
              bench.run(step, {.chunk_spans = 0, .tile_warps = 2, .tokens = 130}));
}

// K and V are loaded once for all heads of a group.
void check_bytes() {
  if (real != nullptr) return;  // only the emulator counts
  for (const int window : {0, 100}) {
    const Case c{DType::bf16, 16, 2, 128, 128, window, 0, false};
    const Bench bench(c, {700, 1045});
    for (const Query& s : {Query{0, 690, 1}, Query{0, 601, 63}, Query{1, 1040, 5}}) {
      Loaded l;
      bench.run({s}, {}, &l);
      const auto same = [&](const char* what, int64_t got, int64_t want) {
        EXPECT(got == want, c.name() + ": " + what + " " + std::to_string(got) +
                                " bytes, expected " + std::to_string(want));
      };
      same("stores", l.stored_by_kernel, l.stored);
      same("merging loads", l.merged_by_kernel, l.merged);
      same("merging stores", l.written_by_kernel, l.written);
      EXPECT(l.kernel == l.kv + l.queries + l.indices,
             c.name() + ": loads " + std::to_string(l.kernel) + " bytes, expected " +
                 std::to_string(l.kv) + " of K and V, " + std::to_string(l.queries) +
                 " of queries and " + std::to_string(l.indices) + " of indices");
    }
  }
}

void check_refusals() {
  AttentionCudaArgs a{};
  a.dtype = DType::bf16, a.heads = 8, a.kv_heads = 2, a.k_dim = a.v_dim = 64, a.scale = 1;
  const auto refuses = [&](auto change) {
    AttentionCudaArgs b = a;
    change(b);
    try {
      plan_attention(b, {1, 1, 100}, {132, 227 << 10});
    } catch (const Error& e) {
      return e.code() == ErrorCode::internal;
    }
    return false;
  };
  EXPECT(!refuses([](AttentionCudaArgs&) {}), "a good shape is refused");
  EXPECT(refuses([](AttentionCudaArgs& b) { b.k_dim = 65; }), "a width of 65 is taken");
  EXPECT(refuses([](AttentionCudaArgs& b) { b.v_dim = 264; }), "a width of 264 is taken");
  EXPECT(refuses([](AttentionCudaArgs& b) { b.heads = 7; }), "7 heads over 2 are taken");
  EXPECT(refuses([](AttentionCudaArgs& b) { b.dtype = DType::f32; }), "float32 is taken");
  EXPECT(refuses([](AttentionCudaArgs& b) { b.pages.v_offset = 8; }), "an offset of 8 is taken");
}

// Every width and size of a group that models have: tails of pages, a window inside of a page.
void check_table() {
  if (kBrief) return;
  int turn = 0;
  for (const int dim : {64, 80, 96, 128, 256}) {
    for (const int group : {1, 4, 7, 8}) {
      const int windows[] = {0, 40, 0, 1, 100};
      const Case c{
          turn % 3 ? DType::bf16 : DType::f16, group, 1, dim, dim, windows[turn % 5], 0, false};
      const Bench bench(c, {70, 5, 131});
      const std::vector<Query> step{{0, 62, 4}, {1, 4, 1}, {2, 130, 1}};
      const SharedVector<uint16_t> out = bench.run(step);
      bench.check(step, out);
      if (c.dtype == DType::bf16) bench.check_against_cpu(step, out);
      const std::vector<Query> other{{0, 65, 1}, {1, 3, 2}, {2, 128, 3}};
      expect_same(c, "another step", step, out, other, bench.run(other));
      ++turn;
    }
  }
}

void check_shapes() {
  const DType bf16 = DType::bf16, f16 = DType::f16;
  check_case({bf16, 4, 1, 128, 128, 0, 0, false}, !kBrief);
  check_case({f16, 14, 2, 64, 64, 40, 0, false}, !kBrief);
  check_case({bf16, 21, 1, 72, 40, 0, 0, false}, false);  // parts of 11 and 10 heads
}

void check_long_contexts() {
  const DType bf16 = DType::bf16, f16 = DType::f16;
  check_long({bf16, 1, 1, 256, 256, 0, 30, true}, 1300);
  check_long({f16, 1, 1, 64, 8, 0, 0, false}, 5200);  // more spans than a merging block has warps
}

void check_more_shapes() {
  const DType bf16 = DType::bf16, f16 = DType::f16;
  if (kBrief) return;
  check_case({bf16, 8, 1, 80, 80, 100, 0, true}, false);
  check_case({f16, 1, 1, 96, 96, 1, 3, false}, false);
  check_case({bf16, 2, 1, 256, 256, 64, 20, false}, true);
  check_case({bf16, 2, 2, 64, 64, 64, 0, true}, false);
  check_case({f16, 7, 1, 128, 128, 0, 5, true}, false);
  check_case({f16, 16, 1, 40, 200, 40, 0, false}, false);  // wider values than keys
  check_case({bf16, 4, 4, 192, 128, 100, 0, false}, false);
  check_long({bf16, 4, 1, 64, 64, 0, 0, true}, 2300);
  check_long({f16, 2, 1, 128, 128, 1500, 0, false}, 2300);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv),
                   {
                       TM_CASE(check_refusals),
                       TM_CASE(check_bytes),
                       TM_CASE(check_shapes),
                       TM_CASE(check_long_contexts),
                       TM_CASE(check_table),
                       TM_CASE(check_more_shapes),
                   },
                   &failures);
}
