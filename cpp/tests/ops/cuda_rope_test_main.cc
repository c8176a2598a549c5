// The GPU's norm, rotation and writing of K and V: against plain loops in double and the CPU's op.
// In emulation, or with "--gpu" on the first real one.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/emulator.h"
#include "ops/rope_kv.h"
#include "ops/rope_kv_cuda.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"

namespace turbomind {
namespace {

int failures = 0;

void fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}
#define EXPECT(ok, what) ((ok) ? void() : fail(what))

// Near zero. A device's rsqrtf may be off by two units in the last place.
double near_zero() {
  return real != nullptr ? 6e-6 : 3e-6;
}

struct Case {
  DType dtype;
  int heads, kv_heads, k_dim, v_dim;
  int rotated;  // width; 0: no rope
  bool interleaved, q_norm, k_norm;
  bool v_norm = false;

  std::string name() const {
    char s[160];
    std::snprintf(s, sizeof s, "%s heads %d/%d dim %d/%d rope %d%s%s%s%s", dtype_name(dtype), heads,
                  kv_heads, k_dim, v_dim, rotated, interleaved ? " interleaved" : "",
                  q_norm ? " q norm" : "", k_norm ? " k norm" : "", v_norm ? " v norm" : "");
    return s;
  }
};

float widen(DType t, uint16_t bits) {
  return t == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}
uint16_t narrow(DType t, float v) {
  return t == DType::bf16 ? f32_to_bf16(v) : f32_to_f16(v);
}

SharedVector<float> random_floats(size_t n, uint32_t seed, float scale) {
  std::mt19937 gen(seed + test_seed);
  std::normal_distribution<float> dist(0, scale);
  SharedVector<float> v(n);
  for (float& x : v) x = dist(gen);
  return v;
}

struct Piece {
  int begin, count;  // tokens of the step
};

// Three sequences: one begins, one crosses a page's border, one adds a token far behind; then two
// tokens of padding.
class Bench {
 public:
  explicit Bench(const Case& c) : c_(c) {
    const std::vector<int> begins{0, 60, 1000}, counts{5, 9, 1};
    max_pages_ = 16;
    num_seqs_ = 4;  // the last is padding
    q_len_ = {5, 9, 1, 0};
    q_begin_ = {0, 5, 14, 15};
    kv_begin_ = {0, 60, 1000, 5};
    tables_.assign(size_t(num_seqs_) * max_pages_, -1);
    tables_[0] = 3, tables_[16] = 1, tables_[17] = 4, tables_[32 + 1000 / 64] = 2, tables_[48] = 5;
    for (int s = 0; s < 3; ++s)
      for (int i = 0; i < counts[s]; ++i) {
        seq_of_token_.push_back(s);
        positions_.push_back(begins[s] + i + (s == 2 ? 130000 : 0));  // far, as long contexts go
      }
    for (int i = 0; i < 2; ++i) seq_of_token_.push_back(3), positions_.push_back(0);
    page_bytes_ = 192 + size_t{2} * kPageTokens * c.kv_heads * (c.k_dim + c.v_dim);
    memory_.assign(6 * page_bytes_, 0xff);
    qkv_ = random_floats(tokens() * cols(), 7, 1.5f);
    q_.assign(tokens() * c.heads * c.k_dim, 0xffff);
    q_weight_ = random_floats(c.k_dim, 8, 0.5f);
    k_weight_ = random_floats(c.k_dim, 9, 0.5f);
    for (int i = 0; i < c.rotated / 2; ++i)
      rope_.inv_freq.push_back(std::pow(10000.0f, -2.0f * i / c.rotated));
    inv_freq_.assign(rope_.inv_freq.begin(), rope_.inv_freq.end());
    rope_.attention_factor = 1.25f;
    rope_.interleaved = c.interleaved;
  }

  size_t tokens() const { return seq_of_token_.size(); }
  size_t cols() const { return (c_.heads + c_.kv_heads) * c_.k_dim + c_.kv_heads * c_.v_dim; }

  RopeKvCudaArgs args() {
    RopeKvCudaArgs a{};
    a.dtype = c_.dtype;
    a.qkv = qkv_.data();
    a.q = q_.data();
    a.pages = {memory_.data(), static_cast<int64_t>(page_bytes_), 128,
               static_cast<int64_t>(128 + size_t{2} * kPageTokens * c_.kv_heads * c_.k_dim)};
    a.seqs = {q_begin_.data(),      q_len_.data(), kv_begin_.data(), tables_.data(),
              seq_of_token_.data(), num_seqs_,     max_pages_,       static_cast<int>(tokens())};
    a.heads = c_.heads, a.kv_heads = c_.kv_heads, a.k_dim = c_.k_dim, a.v_dim = c_.v_dim;
    a.q_weight = c_.q_norm ? q_weight_.data() : nullptr;
    a.k_weight = c_.k_norm ? k_weight_.data() : nullptr;
    a.q_offset = 1, a.k_offset = 0, a.q_eps = a.k_eps = 1e-6f;
    a.v_eps = c_.v_norm ? 1e-6f : 0;
    a.positions = positions_.data();
    a.inv_freq = inv_freq_.data();
    a.half = static_cast<int>(rope_.inv_freq.size());
    a.attention_factor = rope_.attention_factor;
    a.interleaved = rope_.interleaved;
    return a;
  }

  void run(int multiprocessors) {
    emulator::reset_counters();
    rope_write_kv(kind(), nullptr, args(), multiprocessors);
    finish_kernels();
  }
  void check() const;
  void check_q_alone();
  void check_against_cpu();
  void check_bytes();
  const SharedVector<uint8_t>& memory() const { return memory_; }
  const SharedVector<uint16_t>& q() const { return q_; }

 private:
  int position_in_sequence(size_t token) const {
    const int s = seq_of_token_[token];
    return kv_begin_[s] + static_cast<int>(token) - q_begin_[s];
  }
  const uint16_t* stored(bool value, size_t token, int head) const {
    const int at = position_in_sequence(token);
    const int page = tables_[seq_of_token_[token] * max_pages_ + at / kPageTokens];
    const uint16_t* base =
        reinterpret_cast<const uint16_t*>(memory_.data() + page * page_bytes_ + 128);
    if (value) base += kPageTokens * c_.kv_heads * c_.k_dim;
    return base + (size_t(head) * kPageTokens + at % kPageTokens) * (value ? c_.v_dim : c_.k_dim);
  }
  std::vector<double> expected(size_t token, int head) const;

  Case c_;
  int num_seqs_ = 0, max_pages_ = 0;
  size_t page_bytes_ = 0;
  SharedVector<int32_t> q_begin_, q_len_, kv_begin_, tables_, seq_of_token_, positions_;
  SharedVector<uint8_t> memory_;
  SharedVector<float> qkv_, q_weight_, k_weight_, inv_freq_;
  SharedVector<uint16_t> q_;
  RopeTable rope_;
};

// Head `head` of q, then of k, normed and rotated.
std::vector<double> Bench::expected(size_t token, int head) const {
  const bool is_q = head < c_.heads;
  const float* from = qkv_.data() + token * cols() + head * c_.k_dim;
  std::vector<double> x(from, from + c_.k_dim);
  double squares = 0;
  for (double v : x) squares += v * v;
  if (is_q ? c_.q_norm : c_.k_norm)
    for (int d = 0; d < c_.k_dim; ++d)
      x[d] *= (is_q ? 1.0 + q_weight_[d] : k_weight_[d]) / std::sqrt(squares / c_.k_dim + 1e-6);
  const std::vector<double> y = x;
  for (int i = 0; i < c_.rotated / 2; ++i) {
    const float angle = static_cast<float>(positions_[token]) * rope_.inv_freq[i];
    const double cos = std::cos(static_cast<double>(angle)) * 1.25;
    const double sin = std::sin(static_cast<double>(angle)) * 1.25;
    const int a = c_.interleaved ? 2 * i : i, b = c_.interleaved ? a + 1 : i + c_.rotated / 2;
    x[a] = y[a] * cos - y[b] * sin;
    x[b] = y[b] * cos + y[a] * sin;
  }
  return x;
}

void Bench::check() const {
  const double unit = c_.dtype == DType::bf16 ? 1.0 / 128 : 1.0 / 1024;  // in the last place
  size_t written = 0;
  for (size_t t = 0; t < tokens(); ++t) {
    if (q_len_[seq_of_token_[t]] == 0) {
      for (int i = 0; i < c_.heads * c_.k_dim; ++i)
        EXPECT(q_[t * c_.heads * c_.k_dim + i] == 0xffff, c_.name() + ": padding was written");
      continue;
    }
    for (int h = 0; h < c_.heads + c_.kv_heads; ++h) {
      const std::vector<double> want = expected(t, h);
      const uint16_t* got =
          h < c_.heads ? &q_[(t * c_.heads + h) * c_.k_dim] : stored(false, t, h - c_.heads);
      for (int d = 0; d < c_.k_dim; ++d) {
        const double x = widen(c_.dtype, got[d]);
        EXPECT(std::abs(x - want[d]) <= 0.51 * unit * std::abs(want[d]) + near_zero(),
               c_.name() + ": head " + std::to_string(h) + " gives " + std::to_string(x) +
                   ", not " + std::to_string(want[d]));
      }
    }
    for (int h = 0; h < c_.kv_heads; ++h) {
      const float* v = &qkv_[t * cols() + (c_.heads + c_.kv_heads) * c_.k_dim + h * c_.v_dim];
      const double squares = std::inner_product(v, v + c_.v_dim, v, 0.0);
      for (int d = 0; d < c_.v_dim; ++d, ++written) {
        const uint16_t got = stored(true, t, h)[d];
        if (!c_.v_norm) {
          EXPECT(got == narrow(c_.dtype, v[d]), c_.name() + ": V differs");
          continue;
        }
        const double want = v[d] / std::sqrt(squares / c_.v_dim + 1e-6);
        EXPECT(std::abs(widen(c_.dtype, got) - want) <= 0.51 * unit * std::abs(want) + near_zero(),
               c_.name() + ": normed V differs");
      }
    }
  }
  size_t changed = 0;  // of 16-bit words: K and V of 15 tokens, nothing else
  for (size_t i = 0; i < memory_.size(); i += 2)
    changed += memory_[i] != 0xff || memory_[i + 1] != 0xff;
  EXPECT(changed == written / c_.v_dim * (c_.k_dim + c_.v_dim),
         c_.name() + ": " + std::to_string(changed) + " words of pages were written");
}

// The CPU rounds products one by one; the angles are the same.
void Bench::check_against_cpu() {
  if (c_.dtype != DType::bf16) return;
  ThreadPool pool(1);
  Profiler profiler;
  Context ctx{pool, Isa::portable, profiler};
  KvLayout layout;
  layout.dtype = DType::f32, layout.kv_heads = c_.kv_heads;
  layout.k_dim = c_.k_dim, layout.v_dim = c_.v_dim;
  std::vector<uint8_t> memory(6 * layout.layer_bytes());
  const int64_t rows = 15, q_cols = int64_t{c_.heads} * layout.k_width();
  std::vector<float> cos(rows * rope_.inv_freq.size()), sin(cos.size()), q(rows * q_cols);
  rope_angles(ctx, rope_, positions_.data(), rows, cos.data(), sin.data());
  std::vector<AttentionSeq> seqs;
  for (int s = 0; s < 3; ++s)
    seqs.push_back({q_begin_[s], q_len_[s], kv_begin_[s], &tables_[s * max_pages_]});
  AttentionShape shape;
  shape.heads = c_.heads, shape.kv_heads = c_.kv_heads, shape.k_dim = c_.k_dim;
  shape.v_dim = c_.v_dim, shape.scale = 1;
  HeadNorms norms;
  if (c_.q_norm) norms.q = {NormKind::rms, 1e-6f, 1, q_weight_.data()};
  if (c_.k_norm) norms.k = {NormKind::rms, 1e-6f, 0, k_weight_.data()};
  if (c_.v_norm) norms.v = {NormKind::rms, 1e-6f};
  const int64_t width = static_cast<int64_t>(cols());
  rope_write_kv(ctx, shape, layout, {memory.data(), layout.layer_bytes()}, {seqs.data(), 3},
                {qkv_.data(), DType::f32, rows, width, width}, norms,
                {rope_.inv_freq.empty() ? nullptr : &rope_, cos.data(), sin.data()},
                {q.data(), DType::f32, rows, q_cols, q_cols});
  for (int64_t t = 0; t < rows; ++t)
    for (int h = 0; h < c_.heads; ++h)
      for (int d = 0; d < c_.k_dim; ++d) {
        const double want = q[t * q_cols + h * layout.k_width() + d];
        const double got = bf16_to_f32(q_[(t * c_.heads + h) * c_.k_dim + d]);
        EXPECT(std::abs(got - want) <= std::abs(want) / 250 + near_zero(),
               c_.name() + ": q is not the CPU's");
      }
}

// Every projection is read once, every 16-bit value written once.
void Bench::check_bytes() {
  if (real != nullptr) return;  // only the emulator counts
  const auto all = emulator::counters("rope_write_heads");
  const int64_t rows = 15, values = rows * rope_kv_values(args());
  int64_t weights = 0;
  if (c_.q_norm) weights += int64_t{4} * rows * c_.heads * c_.k_dim;
  if (c_.k_norm) weights += int64_t{4} * rows * c_.kv_heads * c_.k_dim;
  // A token's fields by each thread of its block, the frequencies once; two tokens are padding.
  const int64_t half = c_.rotated / 2;
  const int64_t threads = std::max(c_.k_dim, c_.v_dim) <= 128 ? 128 : 256;
  const int64_t fields = rows * (threads * 4 * (half ? 6 : 5) + 4 * half) + 2 * threads * 4 * 2;
  const int64_t other = all.bytes_loaded - 4 * values - weights;
  EXPECT(all.bytes_stored == 2 * values, c_.name() + ": stores " +
                                             std::to_string(all.bytes_stored) + " bytes, not " +
                                             std::to_string(2 * values));
  EXPECT(other == fields, c_.name() + ": loads " + std::to_string(other) +
                              " bytes beside values and weights, expected " +
                              std::to_string(fields));
}

// q without K and V in the projection has the same bits, and the pages stay as they are.
void Bench::check_q_alone() {
  const SharedVector<uint8_t> memory = memory_;
  const SharedVector<uint16_t> whole = q_;
  const size_t width = size_t(c_.heads) * c_.k_dim;
  SharedVector<float> alone(tokens() * width);
  for (size_t t = 0; t < tokens(); ++t)
    std::copy_n(qkv_.begin() + t * cols(), width, alone.begin() + t * width);
  q_.assign(q_.size(), 0xffff);
  RopeKvCudaArgs a = args();
  a.qkv = alone.data(), a.kv_heads = 0;
  rope_write_kv(kind(), nullptr, a, 1);
  finish_kernels();
  EXPECT(q_ == whole && memory_ == memory, c_.name() + ": q alone differs, or writes into pages");
}

void check_case(const Case& c) {
  Bench bench(c), wide(c);
  bench.run(1);  // a block per token
  bench.check();
  bench.check_bytes();
  bench.check_against_cpu();
  bench.check_q_alone();
  wide.run(132);  // several
  EXPECT(wide.q() == bench.q() && wide.memory() == bench.memory(),
         c.name() + ": the number of blocks changes bits");
}

void check_refusals() {
  Bench bench({DType::bf16, 2, 1, 64, 64, 64, false, false, false});
  const auto refuses = [&](auto change) {
    RopeKvCudaArgs a = bench.args();
    change(a);
    try {
      rope_write_kv(kind(), nullptr, a, 1);
    } catch (const Error& e) {
      return e.code() == ErrorCode::internal;
    }
    return false;
  };
  EXPECT(refuses([](RopeKvCudaArgs& a) { a.k_dim = 60; }), "a width of 60 is taken");
  EXPECT(refuses([](RopeKvCudaArgs& a) { a.half = 33; }), "a rotated width of 66 is taken");
  EXPECT(refuses([](RopeKvCudaArgs& a) { a.dtype = DType::f32; }), "float32 is taken");
}

void check_shapes() {
  const DType bf16 = DType::bf16, f16 = DType::f16;
  check_case({bf16, 8, 2, 128, 128, 128, false, false, false});
  check_case({f16, 7, 1, 64, 64, 32, false, true, true});
  check_case({bf16, 3, 3, 80, 80, 80, true, true, false});
  check_case({f16, 4, 1, 96, 96, 0, false, false, true});
  check_case({bf16, 2, 1, 256, 256, 64, true, true, true});
  check_case({bf16, 2, 2, 192, 128, 192, false, false, false});
  check_case({f16, 10, 1, 72, 40, 24, true, false, false});
  check_case({bf16, 4, 2, 96, 96, 96, false, true, true, true});
  check_case({f16, 2, 1, 128, 64, 0, false, false, false, true});
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv),
                   {
                       TM_CASE(check_refusals),
                       TM_CASE(check_shapes),
                   },
                   &failures);
}
