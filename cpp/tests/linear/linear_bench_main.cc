// Checks `linear` on every instruction set of this machine against a naive loop in double, and its
// row invariance bit for bit. With an argument (seconds per figure) it then prints rates.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ceilings/ceilings.h"
#include "core/error.h"
#include "core/memory.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "tests/check.h"
#include "tests/linear/random_codes.h"

namespace turbomind {
namespace {

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (ok) return;
  if (++failures <= 40) std::fprintf(stderr, "FAILED %s\n", what.c_str());
}

float round_to(float v, DType t) {
  return t == DType::f32   ? v
         : t == DType::f16 ? f16_to_f32(f32_to_f16(v))
                           : bf16_to_f32(f32_to_bf16(v));
}

void put(void* data, DType t, int64_t i, float v) {
  if (t == DType::f32)
    static_cast<float*>(data)[i] = v;
  else
    static_cast<uint16_t*>(data)[i] = t == DType::f16 ? f32_to_f16(v) : f32_to_bf16(v);
}

float get(const void* data, DType t, int64_t i) {
  if (t == DType::f32) return static_cast<const float*>(data)[i];
  const uint16_t h = static_cast<const uint16_t*>(data)[i];
  return t == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
}

// Rounds each group of a row as products with codes round x: the largest magnitude is 127.
void round_to_int8(float* row, int64_t k, int64_t group) {
  for (int64_t begin = 0; begin < k; begin += group) {
    const int64_t end = std::min(k, begin + group);
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(row[i]));
    const float scale = largest / 127, inverse = 127 / largest;
    for (int64_t i = begin; i < end && scale > 0; ++i)
      row[i] = std::rint(row[i] * inverse) * scale + 0.0f;
  }
}

// Owns a matrix whose rows are padded with `pad`.
struct Owned {
  HugeBuffer memory;
  Mat mat;
  Owned(DType t, int64_t rows, int64_t cols, float pad = 0) {
    const int64_t stride = padded_cols(cols);
    memory = HugeBuffer(std::max<int64_t>(1, rows * stride) * dtype_bytes(t));
    mat = {memory.data(), t, rows, cols, stride};
    for (int64_t i = 0; i < rows * stride; ++i) put(memory.data(), t, i, pad);
  }
  float at(int64_t r, int64_t c) const { return get(mat.data, mat.dtype, r * mat.stride + c); }
  void set(int64_t r, int64_t c, float v) { put(mat.data, mat.dtype, r * mat.stride + c, v); }
};

struct Case {
  std::string format;
  DType source = DType::f32, x_dtype = DType::f32, y_dtype = DType::f32;
  int64_t m = 1, n = 16, k = 32;
  Epilogue epilogue = Epilogue::store;
  bool bias = false, addend = false;

  std::string text(Isa isa) const {
    return std::string(isa_name(isa)) + " " + format + " from " + dtype_name(source) + " x " +
           dtype_name(x_dtype) + " y " + dtype_name(y_dtype) + " m " + std::to_string(m) + " n " +
           std::to_string(n) + " k " + std::to_string(k) + " epilogue " +
           std::to_string(static_cast<int>(epilogue)) + (bias ? " bias" : "") +
           (addend ? " addend" : "");
  }
};

// The operands of a case and what the kernels must make of them.
struct Problem {
  Case c;
  std::vector<uint8_t> source;    // [n, k], unaligned like a checkpoint's tensor
  std::vector<float> w, x, bias;  // as multiplied: rounded
  Owned x_mat, addend;
  std::unique_ptr<RandomCodes> codes;  // in place of the source
  HugeBuffer packed;
  LinearWeight weight;

  Problem(const Case& c_, Isa isa, ThreadPool& pool, unsigned seed)
      : c(c_), x_mat(c.x_dtype, c.m, c.k), addend(DType::f32, c.m, c.n) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const WeightFormat& format = weight_format(c.format);
    const bool bf16_x = format.source_dtype() == DType::bf16 && isa_has_bf16_dot(isa);
    source.resize(c.n * c.k * dtype_bytes(c.source) + 1);
    w.resize(c.n * c.k);
    std::vector<uint8_t> aligned(source.size());
    for (size_t i = 0; i < w.size(); ++i) {
      const float v = round_to(normal(rng), c.source);
      put(aligned.data(), c.source, i, v);
      w[i] = round_to(v, format.source_dtype());
    }

    std::memcpy(source.data() + 1, aligned.data(), aligned.size() - 1);
    x.resize(c.m * c.k);
    for (size_t i = 0; i < x.size(); ++i) {
      const float v = round_to(normal(rng), c.x_dtype);
      x_mat.set(i / c.k, i % c.k, v);
      x[i] = bf16_x ? round_to(v, DType::bf16) : v;
    }
    bias.resize(c.n);
    for (float& b : bias) b = normal(rng);
    for (int64_t i = 0; i < c.m * c.n; ++i) addend.set(i / c.n, i % c.n, normal(rng));
    if (const CodeLayout* layout = layout_of(c.format)) {
      codes = std::make_unique<RandomCodes>(*layout, c.n, c.k, rng);
      pack(format, pool);
      take_values(*layout);
    } else {
      pack(format, pool);
    }
  }
  // What the kernels make of codes: tests in Python compare unpack_row with other libraries.
  void take_values(const CodeLayout& layout) {
    for (int64_t j = 0; j < c.n; ++j) weight.format->unpack_row(weight, j, w.data() + j * c.k);
    std::vector<float> row(c.k);
    const std::vector<int32_t>& order = codes->columns;
    for (int64_t r = 0; r < c.m; ++r) {
      float* values = x.data() + r * c.k;
      for (int64_t i = 0; i < c.k; ++i) row[i] = values[order.empty() ? i : order[i]];
      round_to_int8(row.data(), c.k, layout.x_group());
      for (int64_t i = 0; i < c.k; ++i) values[order.empty() ? i : order[i]] = row[i];
    }
  }
  // In two segments, the second starting inside a panel and inside the source.
  void pack(const WeightFormat& format, ThreadPool& pool) {
    const int64_t half = c.n / 3;
    const CodeSource* rows = codes ? &codes->rows : nullptr;
    const void* data = codes ? nullptr : source.data() + 1;
    const std::vector<RowSegment> segments = {
        {data, c.source, 0, half, c.k, nullptr, rows},
        {data, c.source, half, c.n - half, c.k, nullptr, rows}};
    format.check(segments, c.k);
    packed = HugeBuffer(format.packed_bytes(c.n, c.k));
    std::memset(packed.data(), 0xff, packed.size());
    format.pack(pool, segments, c.n, c.k, packed.data());
    weight = {&format, c.n, c.k, packed.data(), packed.size()};
  }
  LinearArgs args() const {
    return {c.bias ? bias.data() : nullptr, c.addend ? &addend.mat : nullptr, c.epilogue};
  }
  double linear_at(int64_t r, int64_t j, double& magnitude) const {
    double sum = 0;
    for (int64_t i = 0; i < c.k; ++i) {
      const double p = double(x[r * c.k + i]) * w[j * c.k + i];
      sum += p;
      magnitude += std::fabs(p);
    }
    if (c.bias) sum += bias[j];
    if (c.addend) sum += addend.at(r, j);
    return sum;
  }
  int64_t y_cols() const { return is_gated(c.epilogue) ? c.n / 2 : c.n; }
  // Rows [begin, end) of the product.
  Owned run(Isa isa, ThreadPool& pool, int64_t begin, int64_t end, TileOrder order = {}) {
    Profiler profiler;
    Context ctx{pool, isa, profiler};
    ctx.tile_order = order;
    Owned y(c.y_dtype, end - begin, y_cols(), 0.25f);
    Mat x_rows = x_mat.mat, add_rows = addend.mat;
    x_rows.rows = add_rows.rows = end - begin;
    x_rows.data = x_rows.row<uint8_t>(0) + begin * x_rows.stride * dtype_bytes(c.x_dtype);
    add_rows.data = add_rows.f32(begin);
    LinearArgs a = args();
    if (c.addend) a.addend = &add_rows;
    linear(ctx, Op::other, weight, x_rows, y.mat, a);
    return y;
  }
};

// What a gated epilogue makes of an up, and its activation of a gate, as published.
double up_term(Epilogue epilogue, double up) {
  return epilogue == Epilogue::swiglu_mul ? std::clamp(up, -7.0, 7.0) + 1 : up;
}
double activated(Epilogue epilogue, double gate) {
  if (epilogue == Epilogue::silu_mul) return gate / (1 + std::exp(-gate));
  if (epilogue == Epilogue::swiglu_mul) {
    gate = std::min(gate, 7.0);
    return gate / (1 + std::exp(-1.702 * gate));
  }
  return 0.5 * gate * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
}

void check_values(const Problem& p, const Owned& y, Isa isa) {
  const Case& c = p.c;
  const double y_eps = c.y_dtype == DType::bf16 ? 1.0 / 256 : 1e-6;
  for (int64_t r = 0; r < c.m; ++r) {
    for (int64_t j = 0; j < p.y_cols(); ++j) {
      double magnitude = 1, want;
      if (is_gated(c.epilogue)) {
        const int64_t at = j / 16 * 32 + j % 16;
        const double gate = p.linear_at(r, at, magnitude),
                     up = up_term(c.epilogue, p.linear_at(r, at + 16, magnitude));
        want = activated(c.epilogue, gate) * up;
        magnitude *= 1 + std::max(std::fabs(gate), std::fabs(up));
      } else {
        want = p.linear_at(r, j, magnitude) + (c.epilogue == Epilogue::add ? 0.25 : 0);
      }
      const double error = std::fabs(y.at(r, j) - want);
      const double bound = (p.codes ? 1e-5 : 2e-6) * magnitude + y_eps * std::fabs(want);
      if (!(error <= bound)) {
        return expect(false, c.text(isa) + " at " + std::to_string(r) + "," + std::to_string(j) +
                                 ": " + std::to_string(y.at(r, j)) + " not " +
                                 std::to_string(want));
      }
    }
    for (int64_t j = p.y_cols(); j < y.mat.stride; ++j) {
      expect(y.at(r, j) == 0, c.text(isa) + ": padding is not zero");
    }
  }
}

bool same_rows(const Owned& a, int64_t a_row, const Owned& b, int64_t b_row, int64_t rows) {
  const size_t row_bytes = a.mat.stride * dtype_bytes(a.mat.dtype);
  return std::memcmp(a.memory.data() + a_row * row_bytes, b.memory.data() + b_row * row_bytes,
                     rows * row_bytes) == 0;
}

// The same bits for a row alone, in a part of the batch, and with other pool sizes.
void check_invariance(Problem& p, const Owned& y, Isa isa, std::vector<ThreadPool*> pools) {
  const int64_t m = p.c.m;
  for (ThreadPool* pool : pools) {
    const Owned again = p.run(isa, *pool, 0, m);
    expect(same_rows(again, 0, y, 0, m),
           p.c.text(isa) + ": differs with " + std::to_string(pool->size()) + " threads");
  }
  for (const int64_t r : {int64_t{0}, m / 2, m - 1}) {
    const Owned alone = p.run(isa, *pools[0], r, r + 1);
    expect(same_rows(alone, 0, y, r, 1), p.c.text(isa) + ": a row alone differs");
    const Owned rest = p.run(isa, *pools.back(), r, m);
    expect(same_rows(rest, 0, y, r, m - r), p.c.text(isa) + ": the last rows differ");
  }
}

// The same bits in every order of the tile kernel. The second shape has rows after the last whole
// tile and a group of one panel, the third a single chunk.
void check_orders(Isa isa) {
  using Stays = TileOrder::Stays;
  ThreadPool one(1), two(2);
  const int64_t shapes[][3] = {{64, 96, 640}, {109, 80, 700}, {70, 160, 100}, {33, 1024, 300}};
  int turn = 0;
  for (const auto& shape : shapes) {
    Case c;
    c.format = "bfloat16";
    c.x_dtype = DType::bf16;
    c.m = shape[0], c.n = shape[1], c.k = shape[2];
    c.bias = turn % 2 == 0;
    c.epilogue = turn == 1 ? Epilogue::add : turn == 3 ? Epilogue::silu_mul : Epilogue::store;
    c.y_dtype = turn == 2 ? DType::bf16 : DType::f32;
    Problem p(c, isa, two, 100 + turn++);
    const Owned y = p.run(isa, two, 0, c.m);
    check_values(p, y, isa);
    for (const int chunk : {3, 8, 16}) {
      for (const Stays stays : {Stays::weights, Stays::rows}) {
        for (const bool stream : {false, true}) {
          const Owned other = p.run(isa, one, 0, c.m, {chunk, stays, stream});
          expect(same_rows(other, 0, y, 0, c.m),
                 c.text(isa) + ": differs with chunk " + std::to_string(chunk));
        }
      }
    }
  }
}

// A matrix of parts has the bits of a product with each of them, and their rows.
void check_parts(Isa isa) {
  ThreadPool two(2);
  const std::pair<int64_t, const char*> parts[] = {
      {20, "int8"}, {33, "int4-g128-bfloat16-minimum"}, {7, "bfloat16"}};
  FormatParts formats;
  for (const auto& [rows, name] : parts) formats.push_back({rows, &weight_format(name)});
  Case c;
  c.m = 9, c.n = 60, c.k = 300, c.bias = c.addend = true;
  c.format = parts_format(formats).name();
  Problem whole(c, isa, two, 7);
  const Owned y = whole.run(isa, two, 0, c.m);
  int64_t first = 0;
  for (const auto& [rows, name] : parts) {
    Case own = c;
    own.format = name;
    Problem alone(own, isa, two, 7);  // the same source
    const RowSegment segment = {whole.source.data() + 1, c.source, first, rows, c.k};
    alone.packed = HugeBuffer(formats[0].second->packed_bytes(c.n, c.k) * 4);
    alone.weight.format->pack(two, {segment}, rows, c.k, alone.packed.data());
    alone.weight.data = alone.packed.data();
    alone.weight.n = alone.c.n = rows;
    alone.bias.assign(whole.bias.begin() + first, whole.bias.begin() + first + rows);
    alone.addend.mat = whole.addend.mat;
    alone.addend.mat.cols = rows;
    alone.addend.mat.data = whole.addend.mat.f32(0) + first;
    const Owned part = alone.run(isa, two, 0, c.m);
    std::vector<float> a(c.k), b(c.k);
    for (int64_t j = 0; j < rows; ++j) {
      for (int64_t r = 0; r < c.m; ++r)
        expect(part.at(r, j) == y.at(r, first + j), c.text(isa) + ": a part differs");
      whole.weight.format->unpack_row(whole.weight, first + j, a.data());
      alone.weight.format->unpack_row(alone.weight, j, b.data());
      expect(a == b, c.text(isa) + ": a row of a part differs");
    }
    first += rows;
  }
  for (int64_t r = 0; r < c.m; ++r)
    for (int64_t j = c.n; j < y.mat.stride; ++j)
      expect(y.at(r, j) == 0, c.text(isa) + ": padding is not zero");
}

void check_pack(const Problem& p, Isa isa) {
  std::vector<float> row(p.c.k);
  for (int64_t j = 0; j < p.c.n; ++j) {
    p.weight.format->unpack_row(p.weight, j, row.data());
    expect(std::memcmp(row.data(), p.w.data() + j * p.c.k, p.c.k * 4) == 0,
           p.c.text(isa) + ": unpack_row is not the inverse of pack");
  }
}

void check_embedding(Problem& p, Isa isa, ThreadPool& pool) {
  Profiler profiler;
  Context ctx{pool, isa, profiler};
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < 40; ++i) ids.push_back(static_cast<int32_t>(i * 7 % p.c.n));
  Owned y(DType::f32, 40, p.c.k, 1.0f);
  embedding(ctx, p.weight, ids.data(), 2.0f, y.mat);
  for (int64_t r = 0; r < 40; ++r) {
    for (int64_t i = 0; i < y.mat.stride; ++i) {
      const float want = i < p.c.k ? p.w[ids[r] * p.c.k + i] * 2.0f : 0.0f;
      expect(y.at(r, i) == want, p.c.text(isa) + ": embedding");
    }
  }
}

std::vector<Case> cases(bool slow) {
  std::vector<Case> all;
  const DType types[] = {DType::f32, DType::f16, DType::bf16};
  std::vector<std::string> formats = {"bfloat16", "float16", "float32"};
  for (const CodeLayout& layout : code_layouts()) formats.push_back(code_format(layout).name());
  const Epilogue epilogues[] = {Epilogue::store, Epilogue::silu_mul, Epilogue::add,
                                Epilogue::gelu_mul, Epilogue::swiglu_mul};
  const int64_t shapes[][2] = {{16, 32},  {1, 1},     {40, 33},  {100, 80},
                               {97, 129}, {160, 600}, {67, 2100}};
  int turn = 0;
  for (const std::string& format : formats) {
    const CodeLayout* layout = layout_of(format);
    for (const auto& shape : shapes) {
      for (int64_t m = 1; m <= 40; m += slow || layout || shape[1] > 1000 ? 7 : 1) {
        Case c;
        c.format = format;
        c.m = m;
        c.n = shape[0];
        c.k = shape[1];
        if (layout && layout->scales == ScaleType::factor) c.k = round_up(c.k, kSuperBlock);
        c.source = types[turn % 3];
        c.x_dtype = turn / 2 % 2 ? DType::bf16 : DType::f32;
        c.epilogue = epilogues[turn / 3 % 5];
        c.y_dtype = c.epilogue != Epilogue::add && turn / 5 % 2 ? DType::bf16 : DType::f32;
        c.bias = turn / 7 % 2;
        c.addend = turn / 11 % 2;
        if (is_gated(c.epilogue)) c.n = round_up(c.n, 32);
        all.push_back(c);
        ++turn;
      }
    }
    if (layout && layout->scales == ScaleType::factor) continue;
    // More rows than one piece, more columns than one group of pieces.
    all.push_back({format, DType::bf16, DType::bf16, DType::f32, slow ? 70 : 530, 48, 40,
                   Epilogue::store, true, false});
    all.push_back(
        {format, DType::f32, DType::f32, DType::bf16, 3, 1500, 64, Epilogue::silu_mul, true, true});
    all.back().n = 1504;
  }
  return all;
}

void check_isa(Isa isa) {
  ThreadPool one(1), two(2), three(3);
  unsigned seed = 1;
  for (const Case& c : cases(isa == Isa::amx_emulated)) {
    Problem p(c, isa, two, seed++);
    check_pack(p, isa);
    const Owned y = p.run(isa, two, 0, c.m);
    check_values(p, y, isa);
    check_invariance(p, y, isa, {&one, &two, &three});
    if (seed % 16 == 0) check_embedding(p, isa, two);
  }
  check_parts(isa);
  Profiler profiler;
  Context ctx{one, isa, profiler};
  Problem p({"bfloat16"}, isa, one, 1);
  Owned y(DType::f32, 1, 17);
  try {
    linear(ctx, Op::other, p.weight, p.x_mat.mat, y.mat);
    expect(false, "a wrong shape was accepted");
  } catch (const Error& e) {
    expect(std::string(e.what()).find("y.cols is 17, expected 16") != std::string::npos, e.what());
  }
}

void print_rates(Isa isa, double seconds) {
  ThreadPool pool(std::max(1u, std::thread::hardware_concurrency()));
  Profiler profiler;
  Context ctx{pool, isa, profiler};
  const double read = measure_read(ctx, size_t{512} << 20, seconds),
               tiles = measure_tiles(ctx, seconds);
  std::printf("%s, %d threads: read %.1f GB/s, tiles %.0f GFLOP/s\n", isa_name(isa), pool.size(),
              read * 1e-9, tiles * 1e-9);
  const int64_t shapes[][2] = {
      {9728, 896}, {896, 4864}, {151936, 896}, {16384, 2048}, {2048, 8192}};
  const char* formats[] = {
      "bfloat16", "float16", "float32", "int8", "int4-g128-bfloat16-minimum", "int4-g32-float16"};
  for (const char* format : formats) {
    for (const auto& s : shapes) {
      for (const int64_t m : {1, 4, 8, 16, 32, 512}) {
        if (m == 512 && s[0] > 100000) continue;
        const double flops = measure_linear(ctx, format, m, s[0], s[1], seconds);
        const double bytes = double(weight_format(format).packed_bytes(s[0], s[1]));
        const double calls = flops / (2.0 * m * s[0] * s[1]);
        std::printf(
            "%-26s n %6ld k %5ld m %4ld: %8.1f GFLOP/s %5.1f%% of tiles, %6.2f GB/s %5.1f%% of "
            "read, %.3f ms\n",
            format, s[0], s[1], m, flops * 1e-9, 100 * flops / tiles, calls * bytes * 1e-9,
            100 * calls * bytes / read, 1e3 / calls);
      }
    }
  }
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  if (argc > 1 && std::atof(argv[1]) > 0) {
    print_rates(argc > 2 ? resolve_isa(argv[2]) : best_isa(), std::atof(argv[1]));
    return 0;
  }
  std::vector<Isa> isas = available_isas();
  if (isa_available(Isa::amx_emulated)) isas.push_back(Isa::amx_emulated);
  std::vector<TestCase> cases;
  for (const Isa isa : isas) {
    if (isa < Isa::amx) continue;
    cases.push_back({std::string(isa_name(isa)) + " orders", [isa] { check_orders(isa); }});
  }
  for (const Isa isa : isas) cases.push_back({isa_name(isa), [isa] { check_isa(isa); }});
  return run_cases(argc, argv, cases, &failures);
}
