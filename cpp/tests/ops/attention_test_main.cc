// Attention, rope, norm and the writing of pages on every instruction set of this machine:
// against plain loops in double, then bit for bit against themselves under other chunkings,
// other sequences of the batch and thread counts.
#include <algorithm>
#include <array>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/memory.h"
#include "ops/attention.h"
#include "ops/embedding.h"
#include "ops/gate.h"
#include "ops/linear.h"
#include "ops/rope_kv.h"
#include "ops/rows.h"
#include "tests/check.h"

namespace turbomind {
namespace {

int failures = 0;

void fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

// The message is only made when it is needed: most checks are of single numbers.
#define EXPECT(ok, what) ((ok) ? void() : fail(what))

struct Case {
  Isa isa;
  DType kv;
  int heads, kv_heads, k_dim, v_dim, window;
  float softcap;
  bool sinks, norm, interleaved, bf16_out;
  int rotated;  // width; 0: no rope
  bool v_norm;

  std::string name() const {
    char s[200];
    std::snprintf(s, sizeof s, "%s kv %s heads %d/%d dim %d/%d window %d cap %g%s%s%s rope %d%s",
                  isa_name(isa), dtype_name(kv), heads, kv_heads, k_dim, v_dim, window, softcap,
                  sinks ? " sinks" : "", norm ? " norm" : "", v_norm ? " v norm" : "", rotated,
                  interleaved ? " interleaved" : "");
    return s;
  }
};

std::vector<float> random_floats(size_t n, uint32_t seed, float scale) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> dist(0, scale);
  std::vector<float> v(n);
  for (float& x : v) x = dist(gen);
  return v;
}

// All tokens of all sequences: projections in, attention out.
struct Sequence {
  int length = 0;
  std::vector<float> qkv;  // [length, cols]
  std::vector<int32_t> pages;
  std::vector<float> q;    // [length, heads * k_width] as written
  std::vector<float> out;  // [length, heads * v_dim]
};

class Bench {
 public:
  Bench(const Case& c, const std::vector<int>& lengths, int threads)
      : c_(c), pool_(threads), ctx_{pool_, c.isa, profiler_} {
    layout_.dtype = c.kv;
    layout_.kv_heads = c.kv_heads;
    layout_.k_dim = c.k_dim;
    layout_.v_dim = c.v_dim;
    layout_.offset = 128;
    int32_t next = 1;
    for (size_t s = 0; s < lengths.size(); ++s) {
      Sequence seq;
      seq.length = lengths[s];
      seq.qkv = random_floats(static_cast<size_t>(lengths[s]) * cols(), 77 + lengths[s], 1.0f);
      for (int p = 0; p * kPageTokens < lengths[s]; ++p) seq.pages.push_back(next++);
      seqs_.push_back(std::move(seq));
    }
    page_bytes_ = layout_.offset + layout_.layer_bytes() + 64;
    memory_ = HugeBuffer(page_bytes_ * next);
    // An earlier owner of the page may have left NaN in every element.
    std::memset(memory_.data(), 0xff, memory_.size());
    norm_weight_ = random_floats(c.k_dim, 5, 0.5f);
    sinks_ = random_floats(c.heads, 6, 2.0f);
    for (int i = 0; i < c.rotated / 2; ++i) {
      rope_.inv_freq.push_back(std::pow(10000.0f, -2.0f * i / c.rotated));
    }
    rope_.attention_factor = 1.25f;
    rope_.interleaved = c.interleaved;
  }

  int cols() const { return (c_.heads + c_.kv_heads) * c_.k_dim + c_.kv_heads * c_.v_dim; }
  const KvLayout& layout() const { return layout_; }
  std::vector<Sequence>& seqs() { return seqs_; }

  // Steps of at most `chunk` tokens of every sequence until all are done; from token `ones` on,
  // steps of one token.
  void run(int chunk, int ones = INT_MAX) {
    for (int done = 0, count = 0;; done += count) {
      count = done >= ones ? 1 : std::min(chunk, ones - done);
      std::vector<AttentionSeq> step;
      std::vector<size_t> who;
      std::vector<std::vector<int32_t>> tables;
      tables.reserve(seqs_.size());
      int64_t rows = 0;
      for (size_t s = 0; s < seqs_.size(); ++s) {
        const int len = std::min(count, seqs_[s].length - done);
        if (len <= 0) continue;
        tables.push_back(seqs_[s].pages);
        for (int p = 0; c_.window && (p + 1) * kPageTokens <= done - c_.window + 1; ++p) {
          tables.back()[p] = -1;
        }
        step.push_back({rows, len, done, tables.back().data()});
        who.push_back(s);
        rows += len;
      }
      if (rows == 0) return;
      run_step(step, who, rows);
    }
  }

  // Element `dim` of token `t` as stored; written from the layout's description alone.
  float stored(bool value, const Sequence& seq, int t, int head, int dim) const {
    const int pair = layout_.pair(), slot = t % kPageTokens;
    size_t at;
    if (value) {
      at = ((static_cast<size_t>(dim / 16) * (kPageTokens / pair) + slot / pair) * 16 + dim % 16) *
               pair +
           slot % pair;
    } else {
      at = ((static_cast<size_t>(slot / 16) * (layout_.k_width() / pair) + dim / pair) * 16 +
            slot % 16) *
               pair +
           dim % pair;
    }
    const uint8_t* p = memory_.data() + seq.pages[t / kPageTokens] * page_bytes_ +
                       (value ? layout_.v_offset(head) : layout_.k_offset(head));
    if (pair == 1) return reinterpret_cast<const float*>(p)[at];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(p)[at];
    return c_.kv == DType::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
  }

  void check_rope_kv() const;
  void check_attention() const;
  void check_q_alone();

 private:
  std::vector<double> reference_row(const float* q, const std::vector<float>& k,
                                    const std::vector<float>& v, int t, int h) const;
  void run_step(const std::vector<AttentionSeq>& step, const std::vector<size_t>& who,
                int64_t rows) {
    const int64_t k_width = layout_.k_width(), q_cols = c_.heads * k_width;
    const int64_t out_cols = c_.heads * c_.v_dim, out_stride = padded_cols(out_cols);
    std::vector<float> qkv(rows * cols());
    std::vector<int32_t> positions(rows);
    for (size_t i = 0; i < step.size(); ++i) {
      const float* from = seqs_[who[i]].qkv.data() + step[i].kv_begin * cols();
      std::copy(from, from + step[i].q_len * cols(), qkv.begin() + step[i].q_begin * cols());
      for (int64_t j = 0; j < step[i].q_len; ++j) {
        positions[step[i].q_begin + j] = static_cast<int32_t>(step[i].kv_begin + j);
      }
    }
    const size_t half = rope_.inv_freq.size();
    std::vector<float> cos(rows * half), sin(rows * half);
    rope_angles(ctx_, rope_, positions.data(), rows, cos.data(), sin.data());
    const DType q_dtype = attention_q_dtype(ctx_, c_.kv);
    std::vector<float> q(rows * q_cols), out(rows * out_stride, NAN);
    const Mat qkv_mat{qkv.data(), DType::f32, rows, cols(), cols()};
    const Mat q_mat{q.data(), q_dtype, rows, q_cols, q_cols};
    const Mat out_mat{out.data(), c_.bf16_out ? DType::bf16 : DType::f32, rows, out_cols,
                      out_stride};
    const AttentionShape shape = this->shape();
    const PageView view{memory_.data(), page_bytes_};
    const SeqBatch batch{step.data(), static_cast<int64_t>(step.size())};
    rope_write_kv(ctx_, shape, layout_, view, batch, qkv_mat, norms(),
                  {half ? &rope_ : nullptr, cos.data(), sin.data()}, q_mat);
    attention(ctx_, shape, layout_, view, batch, q_mat, out_mat, scratch_);
    const auto value = [](const Mat& m, int64_t r, int64_t c) {
      return m.dtype == DType::f32 ? m.f32(r)[c] : bf16_to_f32(m.u16(r)[c]);
    };
    for (size_t i = 0; i < step.size(); ++i) {
      Sequence& seq = seqs_[who[i]];
      for (int64_t r = step[i].q_begin; r < step[i].q_begin + step[i].q_len; ++r) {
        for (int64_t c = 0; c < q_cols; ++c) seq.q.push_back(value(q_mat, r, c));
        for (int64_t c = 0; c < out_cols; ++c) seq.out.push_back(value(out_mat, r, c));
        for (int64_t c = out_cols; c < out_stride; ++c) {
          EXPECT(value(out_mat, r, c) == 0, c_.name() + ": padded columns of out are not zero");
        }
      }
    }
  }

  HeadNorms norms() const {
    HeadNorms norms;
    if (c_.norm) norms.q = norms.k = {NormKind::rms, 1e-6f, 1.0f, norm_weight_.data()};
    if (c_.v_norm) norms.v = {NormKind::rms, 1e-6f};
    return norms;
  }

  AttentionShape shape() const {
    AttentionShape s;
    s.heads = c_.heads;
    s.kv_heads = c_.kv_heads;
    s.k_dim = c_.k_dim;
    s.v_dim = c_.v_dim;
    s.scale = 1.0f / std::sqrt(static_cast<float>(c_.k_dim));
    s.softcap = c_.softcap;
    s.window = c_.window;
    s.sinks = c_.sinks ? sinks_.data() : nullptr;
    return s;
  }

  Case c_;
  ThreadPool pool_;
  Profiler profiler_;
  Context ctx_;
  KvLayout layout_;
  size_t page_bytes_ = 0;
  HugeBuffer memory_;
  std::vector<float> norm_weight_, sinks_;
  RopeTable rope_;
  std::vector<Sequence> seqs_;
  AttentionScratch scratch_;
};

// q and K are normed and rotated, V is normed or copied, padding is zero.
void Bench::check_rope_kv() const {
  const DType q_type = attention_q_dtype(ctx_, c_.kv);
  const int k_width = layout_.k_width(), rot = c_.rotated;
  // Half a unit in the last place of 8, 11 or 24 bits.
  const auto close = [](double got, double want, DType type) {
    const double bound = type == DType::bf16 ? 4.0e-3 : type == DType::f16 ? 4.9e-4 : 2e-6;
    return std::abs(got - want) <= bound * std::abs(want) + 4e-6;
  };
  for (const Sequence& seq : seqs_) {
    for (int t = 0; t < seq.length; ++t) {
      for (int h = 0; h < c_.heads + c_.kv_heads; ++h) {
        const bool is_q = h < c_.heads;
        std::vector<double> x(k_width, 0.0);
        double squares = 0;
        for (int d = 0; d < c_.k_dim; ++d) {
          x[d] = seq.qkv[static_cast<size_t>(t) * cols() + h * c_.k_dim + d];
          squares += x[d] * x[d];
        }
        for (int d = 0; c_.norm && d < c_.k_dim; ++d) {
          x[d] *= (1.0 + norm_weight_[d]) / std::sqrt(squares / c_.k_dim + 1e-6);
        }
        const std::vector<double> y = x;
        for (int i = 0; i < rot / 2; ++i) {
          const double angle = static_cast<float>(t) * rope_.inv_freq[i];
          const double cos = std::cos(angle) * 1.25, sin = std::sin(angle) * 1.25;
          const int a = c_.interleaved ? 2 * i : i, b = c_.interleaved ? a + 1 : i + rot / 2;
          x[a] = y[a] * cos - y[b] * sin;
          x[b] = y[b] * cos + y[a] * sin;
        }
        for (int d = 0; d < k_width; ++d) {
          const float got = is_q ? seq.q[(static_cast<size_t>(t) * c_.heads + h) * k_width + d]
                                 : stored(false, seq, t, h - c_.heads, d);
          EXPECT(close(got, x[d], is_q ? q_type : c_.kv), c_.name() + (is_q ? ": q " : ": K ") +
                                                              std::to_string(got) + " is not " +
                                                              std::to_string(x[d]));
        }
      }
      for (int h = 0; h < c_.kv_heads; ++h) {
        const float* v = seq.qkv.data() + static_cast<size_t>(t) * cols() +
                         (c_.heads + c_.kv_heads) * c_.k_dim + h * c_.v_dim;
        const double squares = std::inner_product(v, v + c_.v_dim, v, 0.0);
        for (int d = 0; d < layout_.v_width(); ++d) {
          float want = d < c_.v_dim ? v[d] : 0.0f;
          if (c_.v_norm) {
            const double normed = want / std::sqrt(squares / c_.v_dim + 1e-6);
            EXPECT(close(stored(true, seq, t, h, d), normed, c_.kv), c_.name() + ": normed V");
            continue;
          }
          if (c_.kv == DType::bf16) want = bf16_to_f32(f32_to_bf16(want));
          if (c_.kv == DType::f16) want = f16_to_f32(f32_to_f16(want));
          EXPECT(stored(true, seq, t, h, d) == want, c_.name() + ": V differs");
        }
      }
    }
  }
}

// q without K and V in the projection has the same bits, and the pages stay as they are.
void Bench::check_q_alone() {
  const Sequence& seq = seqs_.front();
  const int64_t rows = seq.length, q_cols = c_.heads * layout_.k_width();
  const int64_t cols = int64_t{c_.heads} * c_.k_dim;
  std::vector<int32_t> positions(rows);
  std::iota(positions.begin(), positions.end(), 0);
  std::vector<float> alone(rows * cols), q(rows * q_cols);
  for (int64_t r = 0; r < rows; ++r)
    std::copy_n(seq.qkv.begin() + r * this->cols(), cols, alone.begin() + r * cols);
  const size_t half = rope_.inv_freq.size();
  std::vector<float> cos(rows * half), sin(rows * half);
  rope_angles(ctx_, rope_, positions.data(), rows, cos.data(), sin.data());
  const std::vector<uint8_t> before(memory_.data(), memory_.data() + memory_.size());
  const AttentionSeq all{0, rows, 0, seq.pages.data()};
  const Mat q_mat{q.data(), attention_q_dtype(ctx_, c_.kv), rows, q_cols, q_cols};
  rope_write_kv(ctx_, shape(), layout_, {memory_.data(), page_bytes_}, {&all, 1},
                {alone.data(), DType::f32, rows, cols, cols}, norms(),
                {half ? &rope_ : nullptr, cos.data(), sin.data()}, q_mat);
  const bool bf16 = q_mat.dtype == DType::bf16;
  for (int64_t i = 0; i < rows * q_cols; ++i)
    EXPECT((bf16 ? bf16_to_f32(q_mat.u16(0)[i]) : q[i]) == seq.q[i], c_.name() + ": q alone");
  EXPECT(std::equal(before.begin(), before.end(), memory_.data()),
         c_.name() + ": q alone writes into pages");
}

// Against a plain softmax over the stored K and V. With bf16 products the weights are rounded to
// bf16 too: half a unit in 2^8 of each, against values of at most about 4.
void Bench::check_attention() const {
  const bool rounded = attention_q_dtype(ctx_, c_.kv) == DType::bf16;
  const double tolerance = (rounded ? 8e-3 : 1e-5) + (c_.bf16_out ? 1.6e-2 : 0);
  const int k_width = layout_.k_width(), group = c_.heads / c_.kv_heads;
  for (const Sequence& seq : seqs_) {
    for (int h = 0; h < c_.heads; ++h) {
      std::vector<float> k, v;
      for (int t = 0; t < seq.length; ++t) {
        for (int d = 0; d < c_.k_dim; ++d) k.push_back(stored(false, seq, t, h / group, d));
        for (int d = 0; d < c_.v_dim; ++d) v.push_back(stored(true, seq, t, h / group, d));
      }
      // Long sequences would take minutes.
      for (int t = 0; t < seq.length; t += seq.length > 1000 ? 97 : 1) {
        const float* q = seq.q.data() + (static_cast<size_t>(t) * c_.heads + h) * k_width;
        const std::vector<double> want = reference_row(q, k, v, t, h);
        for (int d = 0; d < c_.v_dim; ++d) {
          const double got = seq.out[(static_cast<size_t>(t) * c_.heads + h) * c_.v_dim + d];
          EXPECT(std::abs(got - want[d]) <= tolerance, c_.name() + ": token " + std::to_string(t) +
                                                           " gives " + std::to_string(got) +
                                                           ", not " + std::to_string(want[d]));
        }
      }
    }
  }
}

// Query t of head h over keys k [.., k_dim] and values v [.., v_dim].
std::vector<double> Bench::reference_row(const float* q, const std::vector<float>& k,
                                         const std::vector<float>& v, int t, int h) const {
  const double scale = 1.0f / std::sqrt(static_cast<float>(c_.k_dim));
  const int first = c_.window ? std::max(0, t - c_.window + 1) : 0;
  std::vector<double> s(t + 1), out(c_.v_dim, 0.0);
  double top = c_.sinks ? sinks_[h] : -1e300;
  for (int j = first; j <= t; ++j) {
    for (int d = 0; d < c_.k_dim; ++d) s[j] += static_cast<double>(q[d]) * k[j * c_.k_dim + d];
    s[j] *= scale;
    if (c_.softcap > 0) s[j] = c_.softcap * std::tanh(s[j] / c_.softcap);
    top = std::max(top, s[j]);
  }
  double sum = c_.sinks ? std::exp(sinks_[h] - top) : 0;
  for (int j = first; j <= t; ++j) {
    const double w = std::exp(s[j] - top);
    sum += w;
    for (int d = 0; d < c_.v_dim; ++d) out[d] += w * v[j * c_.v_dim + d];
  }
  for (double& x : out) x /= sum;
  return out;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void check_case(const Case& c) {
  const std::vector<int> lengths{230, 1, 64};
  Bench whole(c, lengths, 1);
  whole.run(1000);
  whole.check_rope_kv();
  whole.check_attention();
  whole.check_q_alone();
  const auto compare = [&](Bench& other, size_t at, size_t of, const std::string& what) {
    EXPECT(
        same_bits(other.seqs()[at].q, whole.seqs()[of].q) &&
            same_bits(other.seqs()[at].out, whole.seqs()[of].out),
        c.name() + ": " + what + " changes bits of the sequence of " + std::to_string(lengths[of]));
  };
  for (const int chunk : {1, 7, 64}) {
    Bench other(c, lengths, chunk == 7 ? 2 : 1);
    other.run(chunk);
    for (size_t s = 0; s < lengths.size(); ++s) {
      compare(other, s, s, "chunk " + std::to_string(chunk));
    }
  }
  Bench threaded(c, lengths, 2);
  threaded.run(1000);
  for (size_t s = 0; s < lengths.size(); ++s) compare(threaded, s, s, "a second thread");
  for (size_t s = 0; s < lengths.size(); ++s) {
    Bench alone(c, {lengths[s]}, 1);
    alone.run(33);
    compare(alone, 0, s, "being alone");
  }
}

// Sanitizers need ten times the time: there each instruction set checks every other case.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

void check_isa(Isa isa) {
  const int before = failures;
  const int dims[] = {8, 64, 80, 96, 128}, windows[] = {0, 1, 7, 64, 100};
  const int shapes[][2] = {{4, 1}, {6, 3}, {2, 2}};  // MQA, GQA with 3 kv heads, MHA
  int n = 0;
  for (const DType kv : {DType::bf16, DType::f32, DType::f16}) {
    for (int d = 0; d < 5; ++d) {
      for (int w = 0; w < 5; ++w, ++n) {
        Case c{};
        c.isa = isa;
        c.kv = kv;
        c.heads = shapes[(d + w) % 3][0];
        c.kv_heads = shapes[(d + w) % 3][1];
        c.k_dim = dims[d];
        c.v_dim = n % 5 == 3 ? dims[(d + 2) % 5] : dims[d];
        c.window = windows[w];
        c.softcap = n % 3 == 1 ? 3.0f : 0.0f;
        c.sinks = n % 4 == 2;
        c.norm = n % 3 == 2;
        c.v_norm = n % 4 == 3;
        c.interleaved = n % 7 == 3;
        c.bf16_out = n % 4 == 1;
        c.rotated = n % 6 == 5 ? 0 : n % 6 == 2 ? dims[d] / 2 : dims[d];
        if (!kSanitized || n % 2 == static_cast<int>(isa) % 2) check_case(c);
      }
    }
  }
  std::printf("%-13s %d cases, %d failures\n", isa_name(isa), n, failures - before);
}

// Sequences of several splits and spans: under other chunkings and thread counts, which cut their
// keys into other tasks, and other sequences of the batch.
void check_long(Isa isa) {
  const std::vector<int> lengths{4700, 1, 700, 1030};
  for (const int window : {0, 600, 4200}) {
    for (const DType kv : {DType::bf16, DType::f32, DType::f16}) {
      if (window != 600 && (kSanitized || kv != DType::bf16)) continue;
      Case c{};
      c.isa = isa;
      c.kv = kv;
      c.heads = 3;
      c.kv_heads = 1;
      c.k_dim = c.v_dim = 16;
      c.window = window;
      c.sinks = window == 600;
      Bench whole(c, lengths, 1);
      whole.run(5000);
      whole.check_attention();
      const auto compare = [&](Bench& other, size_t at, size_t of, const std::string& what) {
        EXPECT(same_bits(other.seqs()[at].out, whole.seqs()[of].out),
               c.name() + ": " + what + " changes bits of the sequence of " +
                   std::to_string(lengths[of]));
      };
      const struct {
        int threads, chunk, ones;
      } runs[] = {{2, 301, INT_MAX}, {7, 4600, 4690}};
      for (const auto& r : runs) {
        Bench other(c, lengths, r.threads);
        other.run(r.chunk, r.ones);
        for (size_t s = 0; s < lengths.size(); ++s) {
          compare(other, s, s,
                  std::to_string(r.threads) + " threads, chunk " + std::to_string(r.chunk));
        }
      }
      Bench alone(c, {lengths[0]}, 7);
      alone.run(4600, 4650);
      compare(alone, 0, 0, "being alone");
    }
  }
}

// An infinite value reaches only rows whose window reaches its page, although tiles write others.
void check_infinite_value(Isa isa) {
  for (const DType kv : {DType::bf16, DType::f32, DType::f16}) {
    Case c{};
    c.isa = isa;
    c.kv = kv;
    c.heads = 4;
    c.kv_heads = 1;
    c.k_dim = c.v_dim = 16;
    c.window = 7;
    Bench whole(c, {150}, 1);
    for (int d = 0; d < c.v_dim; ++d) whole.seqs()[0].qkv[5 * c.k_dim + d] = INFINITY;
    whole.run(150);
    const std::vector<float>& out = whole.seqs()[0].out;
    const size_t cols = c.heads * c.v_dim;
    EXPECT(!std::isfinite(out[0]), c.name() + ": an infinite value is lost");
    for (size_t i = (kPageTokens + c.window - 1) * cols; i < out.size(); ++i) {
      EXPECT(std::isfinite(out[i]),
             c.name() + ": an infinite value reaches token " + std::to_string(i / cols));
    }
  }
}

// The tasks of a plan that have work; checks that each unit of each block occurs once.
int64_t count_tasks(const AttentionTasks& plan, const std::vector<AttentionSeq>& seqs) {
  int64_t tasks = 0;
  std::vector<std::array<int64_t, 4>> seen;
  for (int64_t i = 0; i < plan.size(); ++i) {
    const AttentionTask task = plan.task(i);
    const UnitRange units = plan.units(seqs[task.of->seq], *task.of, task.block);
    seen.push_back({task.of->seq, task.head, task.block, task.unit});
    EXPECT(units.last - units.first < task.of->units, "a block sees more units than it has tasks");
    tasks += units.first + task.unit <= units.last;
  }
  std::sort(seen.begin(), seen.end());
  EXPECT(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "a task occurs twice");
  return tasks;
}

// One long sequence has work for all threads of a large machine, beside short ones too; short
// sequences and single threads are not split, and no plan takes more memory than was promised.
void check_tasks() {
  AttentionTasks plan;
  AttentionTaskShape shape{7, 2, 0, 32, 256, 56};
  std::vector<AttentionSeq> seqs{{0, 1, 65535, nullptr}};
  const auto tasks = [&] {
    plan.plan(shape, seqs.data(), static_cast<int64_t>(seqs.size()));
    EXPECT(plan.partial_rows() <= AttentionTasks::most_partial_rows(shape.workers) &&
               plan.split_blocks() <= AttentionTasks::most_split_blocks(shape.workers),
           "a plan needs more memory than was promised");
    return count_tasks(plan, seqs);
  };
  EXPECT(tasks() >= 4 * 56,
         "one sequence of 64k keys has " + std::to_string(tasks()) + " tasks for 56 workers");
  for (int i = 1; i < 16; ++i) seqs.push_back({i, 1, 200, nullptr});
  EXPECT(tasks() >= 4 * 56 + 15 * 2, "short sequences keep a long one from being split");
  EXPECT(plan.task(0).of->seq == 0, "the longest tasks do not come first");
  shape.workers = 1;
  EXPECT(tasks() == 16 * 2 && plan.partial_rows() == 0, "one thread splits keys");
  shape.workers = 56;
  seqs = {{0, 1, 1000, nullptr}};
  EXPECT(tasks() == 2 && plan.partial_rows() == 0, "a short sequence is split");
  seqs = {{0, 512, 0, nullptr}};  // 3,584 rows of each head
  EXPECT(tasks() >= 4 * 56 && plan.partial_rows() == 0, "a prompt's keys are split");
  seqs = {{0, 8192, 0, nullptr}};
  EXPECT(tasks() >= 4 * 56 && plan.sequences()[0].block_rows == 256,
         "a long prompt has low blocks");
  seqs = {{0, 16, 60000, nullptr}};
  EXPECT(tasks() >= 4 * 56, "a short chunk of a long sequence is not split");
  shape.window = 5000;
  EXPECT(tasks() >= 56, "a window is not split");
  shape = {4, 8, 0, 32, 256, 56};
  seqs.clear();
  for (int i = 0; i < 6; ++i) seqs.push_back({i, 1, (int64_t{1} << 20) - 1, nullptr});
  EXPECT(tasks() >= 4 * 56, "sequences of a million tokens are not split");
}

// Every op names itself, the type it was given and the types that it takes.
void check_refused_types(Context& ctx, const Mat& x) {
  const auto refuses = [](const std::string& message, auto&& call) {
    try {
      call();
    } catch (const Error& e) {
      EXPECT(e.what() == message, message + ", got: " + e.what());
      return;
    }
    fail(message + ", got no error");
  };
  Mat half = x;
  half.dtype = DType::f16;
  AttentionScratch scratch;
  AttentionShape shape{1, 1, 4, 4, 1.0f, 0, 0, nullptr};
  KvLayout layout;
  layout.kv_heads = 1;
  layout.k_dim = layout.v_dim = 4;
  layout.dtype = DType::f16;
  const LinearWeight weight{&weight_format("float32"), 4, 4, static_cast<uint8_t*>(x.data), 64};
  const std::string two = "float32 or bfloat16 on the CPU", one = "float32 on the CPU";
  refuses("rms_norm: y is float16, expected " + two,
          [&] { rms_norm(ctx, {NormKind::rms, 1e-6f, 0, x.f32(0)}, x, half); });
  refuses("attention: out is float16, expected " + two,
          [&] { attention(ctx, shape, layout, {}, {}, x, half, scratch); });
  refuses("rope_write_kv: qkv is float16, expected " + one,
          [&] { rope_write_kv(ctx, shape, layout, {}, {}, half, {}, {}, x); });
  refuses("linear: x is float16, expected " + two,
          [&] { linear(ctx, Op::other, weight, half, x); });
  refuses("embedding: y is float16, expected " + one,
          [&] { embedding(ctx, weight, nullptr, 1, half); });
  refuses("add_scaled: x is float16, expected " + one, [&] { add_scaled(ctx, half, 1, half); });
  refuses("scale_and_cap: x is float16, expected " + one, [&] { scale_and_cap(ctx, 1, 1, half); });
  refuses("multiply_gate: gate is float16, expected " + one,
          [&] { multiply_gate(ctx, Epilogue::gelu_mul, half, x, x); });
  refuses("multiply_gate: up is float16, expected " + one,
          [&] { multiply_gate(ctx, Epilogue::gelu_mul, x, half, x); });
  refuses("multiply_gate: y is float16, expected " + two,
          [&] { multiply_gate(ctx, Epilogue::gelu_mul, x, x, half); });
  refuses("multiply_gate: got epilogue 0, expected silu_mul or gelu_mul",
          [&] { multiply_gate(ctx, Epilogue::store, x, x, x); });
}

// A mistake in the wiring is an Error that the engine survives.
void check_refusals() {
  ThreadPool pool(1);
  Profiler profiler;
  Context ctx{pool, Isa::portable, profiler};
  float x[64] = {};
  const Mat four{x, DType::f32, 1, 4, 32}, eight{x, DType::f32, 1, 8, 32};
  const auto refused = [](auto&& call) {
    try {
      call();
    } catch (const Error& e) {
      return e.code() == ErrorCode::internal;
    }
    return false;
  };
  EXPECT(refused([&] { rms_norm(ctx, {NormKind::rms, 1e-6f, 0, x}, four, eight); }),
         "rms_norm takes y of another width");
  EXPECT(refused([&] { rms_norm(ctx, {NormKind::rms}, four, four); }),
         "rms_norm takes kind rms without a weight");
  AttentionScratch scratch;
  AttentionShape shape{2, 1, 8, 8, 1.0f, 0, 0, nullptr};
  KvLayout layout;
  layout.kv_heads = 1;
  layout.k_dim = layout.v_dim = 16;
  EXPECT(refused([&] { attention(ctx, shape, layout, {}, {}, four, four, scratch); }),
         "attention takes a layout of another width");
  EXPECT(refused([&] { rope_write_kv(ctx, shape, layout, {}, {}, four, {}, {}, four); }),
         "rope_write_kv takes a layout of another width");
  shape = {1, 1, 4, 4, 1.0f, 0, 0, nullptr};
  layout.k_dim = layout.v_dim = 4;
  const Norm weighted{NormKind::rms, 1e-6f, 0, x};
  const Mat qkv{x, DType::f32, 1, 12, 32}, q{x, DType::f32, 1, 32, 32};
  EXPECT(
      refused([&] { rope_write_kv(ctx, shape, layout, {}, {}, qkv, {{}, {}, weighted}, {}, q); }),
      "rope_write_kv takes a weight of V's norm");
  check_refused_types(ctx, four);
}

// Runs `check` with every instruction set of this machine, and with the emulation of AMX.
void for_each_isa(void (*check)(Isa)) {
  std::vector<Isa> isas = available_isas();
  if (isa_available(Isa::amx_emulated)) isas.push_back(Isa::amx_emulated);
  for (const Isa isa : isas) check(isa);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv,
                   {
                       {"attention", [] { for_each_isa(check_isa); }},
                       {"long_attention", [] { for_each_isa(check_long); }},
                       {"infinite_value", [] { for_each_isa(check_infinite_value); }},
                       TM_CASE(check_tasks),
                       TM_CASE(check_refusals),
                   },
                   &failures);
}
