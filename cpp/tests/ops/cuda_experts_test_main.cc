// Experts on a GPU against the CPU's ops: the experts of a token, the order of rows, products of a
// group and the weighted sum, with ties, idle experts and one to many rows. In the emulator or on
// a real GPU ("--gpu"). Outputs are poisoned.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>

#include "cuda/gpu_context.h"
#include "ops/linear.h"
#include "ops/routing.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"
#include "tests/cuda/gpu_array.h"

namespace turbomind {
namespace {

int failures = 0;

void fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}
#define EXPECT(ok, what) ((ok) ? void() : fail(what))

std::vector<float> random_floats(size_t n, uint32_t seed, float scale) {
  std::mt19937 gen(seed + test_seed);
  std::normal_distribution<float> dist(0, scale);
  std::vector<float> v(n);
  for (float& x : v) x = dist(gen);
  return v;
}

GpuOptions gpu_options() {
  GpuOptions options;
  options.kind = kind();
  options.deterministic = true;  // cuBLASLt computes products alone with other bits than groups
  return options;
}

struct Devices {
  ThreadPool pool{2};
  Profiler profiler;
  GpuContext gpu{gpu_options()};
  Context cpu_context{pool, Isa::portable, profiler};
  Context gpu_context{pool, Isa::portable, profiler, &gpu};
};

// A routing with memory of its own. Elements are of 4 bytes; weights are floats among them.
struct OnCpu {
  std::vector<int32_t> memory;
  Routing r;
  OnCpu(int64_t tokens, const RouteShape& s)
      : memory(routing_elements(tokens, s), -1), r(routing_in(memory.data(), tokens, s)) {}
};
struct OnGpu {
  GpuArray<int32_t> memory;
  Routing r;
  OnGpu(Gpu& gpu, int64_t tokens, const RouteShape& s)
      : memory(gpu, routing_elements(tokens, s)), r(routing_in(memory.data(), tokens, s)) {}
};

struct RouteCase {
  RouteShape shape;
  int64_t tokens;
  bool ties;            // few values, of both zeros
  int idle;             // experts that no token takes, from the first on
  bool scaled = false;  // experts have factors
};

std::string text(const RouteCase& c) {
  char name[120];
  std::snprintf(name, sizeof name, "%lld tokens to %d of %d%s%s%s, %d idle",
                static_cast<long long>(c.tokens), c.shape.top_k, c.shape.experts,
                c.shape.renormalize ? " renormalised" : "", c.scaled ? " scaled" : "",
                c.ties ? " with ties" : "", c.idle);
  return name;
}

// Rows of logits, `stride` apart.
std::vector<float> logits_of(const RouteCase& c, int64_t stride) {
  std::vector<float> logits = random_floats(c.tokens * stride, 5, 2.0f);
  for (int64_t i = 0; i < c.tokens * stride; ++i) {
    const float zero = i % 2 ? 0.0f : -0.0f;
    if (c.ties) logits[i] = std::round(logits[i]) + zero;
    if (i % stride < c.idle) logits[i] = -1e30f;
  }
  return logits;
}

// The definition, one expert after the other.
void check_choice(const RouteCase& c, const float* logits, const int32_t* experts,
                  const float* weights, const std::vector<float>& scale) {
  const int n = c.shape.experts;
  std::vector<int> best(n);
  for (int e = 0; e < n; ++e) best[e] = e;
  std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  std::vector<int> chosen(best.begin(), best.begin() + c.shape.top_k);
  double sum = 0;
  for (int i = 0; i < (c.shape.renormalize ? c.shape.top_k : n); ++i)
    sum += std::exp(static_cast<double>(logits[best[i]]) - logits[best[0]]);
  std::sort(chosen.begin(), chosen.end());
  for (int i = 0; i < c.shape.top_k; ++i) {
    EXPECT(experts[i] == chosen[i], text(c) + ": another expert than the definition's");
    const double factor = c.scaled ? scale[chosen[i]] : 1;
    const double share = std::exp(static_cast<double>(logits[chosen[i]]) - logits[best[0]]) / sum;
    const double weight = factor * share;
    EXPECT(std::fabs(weights[i] - weight) <= 1e-5 * std::fabs(weight) + 1e-30,
           text(c) + ": a weight");
  }
}

void check_route(const RouteCase& c, Devices& d) {
  const int64_t stride = padded_cols(c.shape.experts), n = c.tokens * c.shape.top_k;
  std::vector<float> logits = logits_of(c, stride);
  const GpuArray<float> on_device(d.gpu.gpu(), logits);
  const OnCpu cpu(c.tokens, c.shape);
  const OnGpu gpu(d.gpu.gpu(), c.tokens, c.shape);
  const Mat cpu_logits{logits.data(), DType::f32, c.tokens, c.shape.experts, stride};
  const Mat gpu_logits{on_device.data(), DType::f32, c.tokens, c.shape.experts, stride};
  const std::vector<float> scale = random_floats(c.shape.experts, 10, 1.0f);
  const GpuArray<float> scale_on_device(d.gpu.gpu(), scale);
  RouteShape cpu_shape = c.shape, gpu_shape = c.shape;
  if (c.scaled) cpu_shape.scale = scale.data(), gpu_shape.scale = scale_on_device.data();
  route(d.cpu_context, cpu_shape, cpu_logits, cpu.r);
  route(d.gpu_context, gpu_shape, gpu_logits, gpu.r);
  d.gpu.stream().synchronize();
  std::vector<int32_t> seen = gpu.memory.get();
  const Routing r = routing_in(seen.data(), c.tokens, c.shape);
  for (int64_t t = 0; t < c.tokens; ++t) {
    const int64_t at = t * c.shape.top_k;
    check_choice(c, cpu_logits.f32(t), cpu.r.expert + at, cpu.r.weight + at, scale);
    check_choice(c, cpu_logits.f32(t), r.expert + at, r.weight + at, scale);
  }
  EXPECT(std::equal(r.row, r.row + n, cpu.r.row), text(c) + ": rows of choices");
  EXPECT(std::equal(r.token, r.token + n, cpu.r.token), text(c) + ": tokens of rows");
  EXPECT(std::equal(r.begin, r.begin + c.shape.experts + 1, cpu.r.begin),
         text(c) + ": first rows of experts");
  for (int64_t i = 0; i < n; ++i)
    EXPECT(r.token[r.row[i]] == i / c.shape.top_k && r.row[i] >= r.begin[r.expert[i]] &&
               r.row[i] < r.begin[r.expert[i] + 1],
           text(c) + ": a row is not among its expert's");
}

void test_route() {
  Devices d;
  for (const bool renormalize : {false, true}) {
    for (const bool ties : {false, true}) {
      check_route({{4, 2, renormalize}, 1, ties, 0}, d);
      check_route({{1, 1, renormalize}, 3, ties, 0}, d);
      check_route({{60, 4, renormalize}, 17, ties, 3}, d);
      check_route({{128, 8, renormalize}, 512, ties, 40}, d);
      check_route({{40, 6, renormalize}, 33, ties, 0, true}, d);
      check_route({{kMaxExperts, kMaxTopK, renormalize}, 9, ties, 7}, d);
    }
  }
}

// A NaN takes no expert twice and leaves no weight a number.
void test_nan() {
  Devices d;
  const RouteShape shape{40, 6, true};
  std::vector<float> logits(64, NAN);
  const GpuArray<float> on_device(d.gpu.gpu(), logits);
  const OnCpu cpu(1, shape);
  const OnGpu gpu(d.gpu.gpu(), 1, shape);
  route(d.cpu_context, shape, {logits.data(), DType::f32, 1, 40, 64}, cpu.r);
  route(d.gpu_context, shape, {on_device.data(), DType::f32, 1, 40, 64}, gpu.r);
  d.gpu.stream().synchronize();
  std::vector<int32_t> seen = gpu.memory.get();
  for (const Routing& r : {cpu.r, routing_in(seen.data(), 1, shape)}) {
    for (int i = 0; i < 6; ++i) {
      EXPECT(r.expert[i] >= 0 && r.expert[i] < 40, "NaN: no such expert");
      EXPECT(i == 0 || r.expert[i] > r.expert[i - 1], "NaN: an expert twice");
      EXPECT(std::isnan(r.weight[i]), "NaN: a weight is a number");
    }
  }
}

// `beside`: 0: nothing, 1: an output, 2: one with a gate.
void check_combine(const RouteCase& c, int64_t cols, bool add, int beside, Devices& d) {
  const int64_t stride = padded_cols(c.shape.experts), rows = c.tokens * c.shape.top_k;
  std::vector<float> logits = logits_of(c, stride);
  const OnCpu cpu(c.tokens, c.shape);
  route(d.cpu_context, c.shape, {logits.data(), DType::f32, c.tokens, c.shape.experts, stride},
        cpu.r);
  const GpuArray<int32_t> arrays(d.gpu.gpu(), cpu.memory);
  std::vector<float> outputs = random_floats(rows * cols, 6, 1.0f);
  std::vector<float> y = random_floats(c.tokens * cols, 7, 1.0f);
  const GpuArray<float> gpu_outputs(d.gpu.gpu(), outputs), gpu_y(d.gpu.gpu(), y);
  const std::vector<float> before = y;
  std::vector<float> out = random_floats(c.tokens * cols, 8, 1.0f);
  std::vector<float> gate = random_floats(c.tokens, 9, 2.0f);
  const GpuArray<float> gpu_out(d.gpu.gpu(), out), gpu_gate(d.gpu.gpu(), gate);
  const auto besides = [&](float* o, float* g) {
    BesideExperts b;
    if (beside > 0) b.out = {o, DType::f32, c.tokens, cols, cols};
    if (beside > 1) b.gate = {g, DType::f32, c.tokens, 1, 1};
    return b;
  };
  combine(d.cpu_context, cpu.r, {outputs.data(), DType::f32, rows, cols, cols},
          besides(out.data(), gate.data()), add, {y.data(), DType::f32, c.tokens, cols, cols});
  combine(d.gpu_context, routing_in(arrays.data(), c.tokens, c.shape),
          {gpu_outputs.data(), DType::f32, rows, cols, cols},
          besides(gpu_out.data(), gpu_gate.data()), add,
          {gpu_y.data(), DType::f32, c.tokens, cols, cols});
  d.gpu.stream().synchronize();
  const std::vector<float> seen = gpu_y.get();
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t i = 0; i < cols; ++i) {
      double want = add ? before[t * cols + i] : 0;
      for (int64_t j = t * c.shape.top_k; j < (t + 1) * c.shape.top_k; ++j)
        want += static_cast<double>(cpu.r.weight[j]) * outputs[cpu.r.row[j] * cols + i];
      const double scale = beside > 1 ? 1 / (1 + std::exp(-static_cast<double>(gate[t]))) : beside;
      want += scale * out[t * cols + i];
      EXPECT(std::fabs(y[t * cols + i] - want) <= 2e-6, text(c) + ": the CPU's sum");
      EXPECT(std::fabs(seen[t * cols + i] - want) <= 2e-6, text(c) + ": the GPU's sum");
    }
  }
}

void test_combine() {
  Devices d;
  for (const bool add : {false, true}) {
    for (const int beside : {0, 1, 2}) {
      check_combine({{4, 2, true}, 1, false, 0}, 1, add, beside, d);
      check_combine({{16, 3, false}, 5, false, 2}, 1031, add, beside, d);
    }
  }
}

// ---- products of a group

struct GroupCase {
  DType dtype;
  int weights;
  int64_t rows;  // in all
  int64_t n, k;
  Epilogue epilogue;
  bool bias;
  int64_t most_rows;  // of a weight, as the caller bounds it
};

std::string text(const GroupCase& c) {
  char name[120];
  std::snprintf(name, sizeof name, "%lld rows of %d weights [%lld, %lld] in %s, epilogue %d%s",
                static_cast<long long>(c.rows), c.weights, static_cast<long long>(c.n),
                static_cast<long long>(c.k), dtype_name(c.dtype), static_cast<int>(c.epilogue),
                c.bias ? ", biases" : "");
  return name;
}

// First rows of weights, of which some have none and the second has most.
std::vector<int32_t> begins(const GroupCase& c) {
  std::vector<int32_t> begin(c.weights + 1, 0);
  std::mt19937 gen(3 + test_seed);
  for (int64_t r = 0; r < c.rows; ++r) {
    const int weight = r % 2 && c.weights > 1 ? 1 : static_cast<int>(gen() % c.weights);
    for (int i = (weight % 3 == 2 ? 0 : weight) + 1; i <= c.weights; ++i) ++begin[i];
  }
  return begin;
}

// Rows of a group have the bits that each weight's own product gives them.
void check_group(const GroupCase& c, Devices& d) {
  const WeightFormat& format =
      weight_format(c.dtype == DType::bf16 ? "bfloat16" : "float16", WeightPlace::gpu);
  Gpu& gpu = d.gpu.gpu();
  const size_t bytes = format.packed_bytes(c.n, c.k), apart = (bytes + 255) / 256 * 256;
  std::vector<uint8_t> packed(apart * c.weights, 0xff);
  for (int i = 0; i < c.weights; ++i) {
    const std::vector<float> values = random_floats(c.n * c.k, 20 + i, 0.1f);
    format.pack(d.pool, {{values.data(), DType::f32, 0, c.n, c.k}}, c.n, c.k,
                packed.data() + i * apart);
  }
  const GpuArray<uint8_t> weights(gpu, packed);
  const GpuArray<float> biases(gpu, random_floats(c.weights * (c.n + 64), 8, 1.0f));
  WeightGroup group;
  for (int i = 0; i < c.weights; ++i) {
    group.weights.push_back({&format, c.n, c.k, weights.data() + i * apart, bytes});
    if (c.bias) group.biases.push_back(biases.data() + i * (c.n + 64));
  }
  const int64_t stride = padded_cols(c.k), y_cols = is_gated(c.epilogue) ? c.n / 2 : c.n;
  std::vector<uint16_t> x16(c.rows * stride, 0);
  const std::vector<float> x_values = random_floats(c.rows * c.k, 9, 1.0f);
  for (int64_t i = 0; i < c.rows * c.k; ++i)
    x16[i / c.k * stride + i % c.k] =
        c.dtype == DType::bf16 ? f32_to_bf16(x_values[i]) : f32_to_f16(x_values[i]);
  const GpuArray<uint16_t> x(gpu, x16);
  const GpuArray<float> y(gpu, std::vector<float>(c.rows * y_cols, 0.5f));
  const GpuArray<float> apart_y(gpu, std::vector<float>(c.rows * y_cols, 0.5f));
  const std::vector<int32_t> begin = begins(c);
  const GpuArray<int32_t> on_device(gpu, begin);
  const Mat x_mat{x.data(), c.dtype, c.rows, c.k, stride};
  const Mat y_mat{y.data(), DType::f32, c.rows, y_cols, y_cols};
  const Mat apart_mat{apart_y.data(), DType::f32, c.rows, y_cols, y_cols};
  linear_group(d.gpu_context, Op::other, group, on_device.data(), c.most_rows, x_mat, y_mat,
               c.epilogue);
  for (int i = 0; i < c.weights; ++i) {
    const int64_t rows = begin[i + 1] - begin[i];
    linear(d.gpu_context, Op::other, group.weights[i], x_mat.some_rows(begin[i], rows),
           apart_mat.some_rows(begin[i], rows), {.bias = group.bias(i), .epilogue = c.epilogue});
  }
  d.gpu.stream().synchronize();
  EXPECT(y.get() == apart_y.get(), text(c) + ": other bits than one by one");
}

void test_groups() {
  Devices d;
  for (const DType t : {DType::bf16, DType::f16}) {
    check_group({t, 5, 1, 64, 96, Epilogue::silu_mul, true, 1}, d);
    check_group({t, 40, 9, 72, 40, Epilogue::store, false, 9}, d);
    check_group({t, 7, 60, 40, 64, Epilogue::add, true, 60}, d);
    check_group({t, 3, 40, 96, 64, Epilogue::gelu_mul, false, 40}, d);
    check_group({t, 70, 300, 64, 96, Epilogue::silu_mul, true, 300}, d);
    check_group({t, 1, 130, 136, 64, Epilogue::store, true, 130}, d);
  }
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv),
                   {
                       {"route", test_route},
                       {"nan", test_nan},
                       {"combine", test_combine},
                       {"groups", test_groups},
                   },
                   &failures);
}
