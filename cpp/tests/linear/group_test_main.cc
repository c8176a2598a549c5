// Products of a group on the CPU against each weight's own product, bit by bit, with idle weights
// and one to many rows, for each kind of format and instruction set of this machine. Formats of
// codes need one parallel region for all products of a group and one to round x.
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "core/isa.h"
#include "core/memory.h"
#include "linear/code_format.h"
#include "ops/linear.h"
#include "tests/check.h"

namespace turbomind {
namespace {

int failures = 0;

void fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}
#define EXPECT(ok, what) ((ok) ? void() : fail(what))

std::vector<float> random_floats(size_t n, uint32_t seed, float scale) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> dist(0, scale);
  std::vector<float> v(n);
  for (float& x : v) x = dist(gen);
  return v;
}

struct GroupCase {
  const char* format;
  int weights;
  int64_t rows, n, k;
  Epilogue epilogue;
  bool bias;
};

// First rows of weights, of which every third has none and the second has most.
std::vector<int32_t> begins(const GroupCase& c) {
  std::vector<int32_t> begin(c.weights + 1, 0);
  std::mt19937 gen(3);
  for (int64_t r = 0; r < c.rows; ++r) {
    const int weight = r % 2 && c.weights > 1 ? 1 : static_cast<int>(gen() % c.weights);
    for (int i = (weight % 3 == 2 ? 0 : weight) + 1; i <= c.weights; ++i) ++begin[i];
  }
  return begin;
}

void check_group(const GroupCase& c, Isa isa) {
  ThreadPool pool(2);
  Profiler profiler;
  Context ctx{pool, isa, profiler};
  const WeightFormat& format = weight_format(c.format);
  const size_t bytes = round_up(static_cast<int64_t>(format.packed_bytes(c.n, c.k)), 64);
  HugeBuffer packed(bytes * c.weights);
  WeightGroup group;
  std::vector<std::vector<float>> biases;
  for (int i = 0; i < c.weights; ++i) {
    const std::vector<float> values = random_floats(c.n * c.k, 20 + i, 0.1f);
    format.pack(pool, {{values.data(), DType::f32, 0, c.n, c.k}}, c.n, c.k,
                packed.data() + i * bytes);
    group.weights.push_back({&format, c.n, c.k, packed.data() + i * bytes, bytes});
    biases.push_back(random_floats(c.n, 40 + i, 1.0f));
  }
  if (c.bias)
    for (const std::vector<float>& b : biases) group.biases.push_back(b.data());
  const int64_t stride = padded_cols(c.k), cols = is_gated(c.epilogue) ? c.n / 2 : c.n;
  std::vector<float> x(c.rows * stride, 0.0f), y(c.rows * cols, 0.5f);
  const std::vector<float> values = random_floats(c.rows * c.k, 9, 1.0f);
  for (int64_t i = 0; i < c.rows * c.k; ++i) x[i / c.k * stride + i % c.k] = values[i];
  std::vector<float> apart = y;
  const Mat x_mat{x.data(), DType::f32, c.rows, c.k, stride};
  const Mat y_mat{y.data(), DType::f32, c.rows, cols, cols};
  const Mat apart_mat{apart.data(), DType::f32, c.rows, cols, cols};
  const std::vector<int32_t> begin = begins(c);
  linear_group(ctx, Op::other, group, begin.data(), c.rows, x_mat, y_mat, c.epilogue);
  for (int i = 0; i < c.weights; ++i)
    for (int64_t r = begin[i]; r < begin[i + 1]; ++r)  // each row on its own
      linear(ctx, Op::other, group.weights[i], x_mat.some_rows(r, 1), apart_mat.some_rows(r, 1),
             {.bias = group.bias(i), .epilogue = c.epilogue});
  EXPECT(y == apart, std::string(c.format) + " on " + isa_name(isa) + ": " +
                         std::to_string(c.rows) + " rows of " + std::to_string(c.weights) +
                         " weights have other bits than alone");
}

void check_formats(Isa isa) {
  for (const char* format : {"bfloat16", "float32", "int8", "int4-g64-bfloat16-minimum"}) {
    check_group({format, 5, 1, 64, 96, Epilogue::silu_mul, true}, isa);
    check_group({format, 40, 9, 72, 160, Epilogue::store, false}, isa);
    check_group({format, 7, 60, 48, 200, Epilogue::add, true}, isa);
    check_group({format, 1, 33, 96, 64, Epilogue::gelu_mul, false}, isa);
    check_group({format, 30, 150, 64, 256, Epilogue::swiglu_mul, true}, isa);
  }
}

void test_groups() {
  std::vector<Isa> isas = available_isas();
  if (isa_available(Isa::amx_emulated)) isas.push_back(Isa::amx_emulated);
  for (const Isa isa : isas) check_formats(isa);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv, {{"groups", test_groups}}, &failures);
}
