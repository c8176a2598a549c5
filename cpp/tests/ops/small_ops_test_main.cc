// Norms, gates and scaled sums on every instruction set of this machine: values against doubles,
// and a row alone against a row in a batch.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ops/gate.h"
#include "ops/norm.h"
#include "ops/rows.h"
#include "tests/check.h"

namespace turbomind {
namespace {

int failures = 0;

#define EXPECT(ok, what) ((ok) ? void() : fail(what))

void fail(const std::string& what) {
  if (++failures <= 20) std::printf("FAILED: %s\n", what.c_str());
}

std::vector<float> random_floats(size_t n, uint32_t seed, float scale) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> dist(0, scale);
  std::vector<float> v(n);
  for (float& x : v) x = dist(gen);
  return v;
}

void check_norm(Isa isa) {
  ThreadPool pool(2);
  Profiler profiler;
  Context ctx{pool, isa, profiler};
  for (const int64_t cols : {1, 15, 64, 100, 896, 1000}) {
    const int64_t rows = 40, stride = padded_cols(cols);
    const auto x = random_floats(rows * stride, 9, 3.0f), w = random_floats(cols, 10, 1.0f);
    const Norm norm{NormKind::rms, 1e-5f, 0.5f, w.data()};
    std::vector<float> full(rows * stride, 7.0f), one(stride, 7.0f);
    std::vector<uint16_t> half(rows * stride, 7);
    const Mat in{const_cast<float*>(x.data()), DType::f32, rows, cols, stride};
    rms_norm(ctx, {}, in, {full.data(), DType::f32, rows, cols, stride});
    rms_norm(ctx, {}, in, {half.data(), DType::bf16, rows, cols, stride});
    for (int64_t i = 0; i < rows * stride; ++i) {
      const float want = i % stride < cols ? x[i] : 0.0f;
      EXPECT(full[i] == want && half[i] == f32_to_bf16(want), "a norm of kind none converts");
    }
    rms_norm(ctx, norm, in, {full.data(), DType::f32, rows, cols, stride});
    rms_norm(ctx, norm, in, {half.data(), DType::bf16, rows, cols, stride});
    for (int64_t r = 0; r < rows; ++r) {
      double squares = 0;
      for (int64_t c = 0; c < cols; ++c) squares += double{in.f32(r)[c]} * in.f32(r)[c];
      for (int64_t c = 0; c < stride; ++c) {
        const double want =
            c < cols ? in.f32(r)[c] / std::sqrt(squares / cols + 1e-5) * (w[c] + 0.5) : 0.0;
        const float got = full[r * stride + c];
        EXPECT(std::abs(got - want) <= 2e-6 * std::abs(want), "rms_norm float32");
        EXPECT(half[r * stride + c] == f32_to_bf16(got), "rms_norm bfloat16");
      }
      Mat single = in;
      single.data = in.f32(r);
      single.rows = 1;
      rms_norm(ctx, norm, single, {one.data(), DType::f32, 1, cols, stride});
      EXPECT(std::memcmp(one.data(), full.data() + r * stride, stride * 4) == 0,
             "rms_norm depends on the other rows");
    }
  }
}

void check_gate(Isa isa) {
  ThreadPool pool(2);
  Profiler profiler;
  Context ctx{pool, isa, profiler};
  for (const int64_t cols : {1, 24, 256, 1000}) {
    const int64_t rows = 40, stride = padded_cols(cols), up_stride = 2 * cols + 1;
    const auto gate = random_floats(rows * stride, 11, 3.0f);
    const auto up = random_floats(rows * up_stride, 12, 1.0f);
    const Mat gates{const_cast<float*>(gate.data()), DType::f32, rows, cols, stride};
    const Mat ups{const_cast<float*>(up.data()), DType::f32, rows, cols, up_stride};
    for (const Epilogue epilogue : {Epilogue::silu_mul, Epilogue::gelu_mul}) {
      std::vector<float> full(rows * stride, 7.0f), one(stride, 7.0f);
      std::vector<uint16_t> half(rows * stride, 7);
      multiply_gate(ctx, epilogue, gates, ups, {full.data(), DType::f32, rows, cols, stride});
      multiply_gate(ctx, epilogue, gates, ups, {half.data(), DType::bf16, rows, cols, stride});
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < stride; ++c) {
          const double x = c < cols ? gates.f32(r)[c] : 0;
          const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
          const double active = epilogue == Epilogue::silu_mul ? x / (1 + std::exp(-x))
                                                               : 0.5 * x * (1 + std::tanh(u));
          const double want = c < cols ? active * ups.f32(r)[c] : 0;
          const float got = full[r * stride + c];
          EXPECT(std::abs(got - want) <= 2e-6 * std::abs(want) + 1e-7, "multiply_gate float32");
          // The processor's conversion to bfloat16 flushes denormal numbers.
          EXPECT(half[r * stride + c] == f32_to_bf16(got) || std::abs(got) < 1.2e-38f,
                 "multiply_gate bfloat16");
        }
        const Mat lone_gate{gates.f32(r), DType::f32, 1, cols, stride};
        const Mat lone_up{ups.f32(r), DType::f32, 1, cols, up_stride};
        multiply_gate(ctx, epilogue, lone_gate, lone_up, {one.data(), DType::f32, 1, cols, stride});
        EXPECT(std::memcmp(one.data(), full.data() + r * stride, stride * 4) == 0,
               "multiply_gate depends on the other rows");
      }
    }
  }
}

// y += scale * x, then y *= factor.
void check_scaled_add() {
  ThreadPool pool(2);
  Profiler profiler;
  Context ctx{pool, Isa::portable, profiler};
  const auto x = random_floats(64, 13, 1.0f), y = random_floats(64, 14, 1.0f);
  const float factor = 1.7f;
  for (const float* then : {static_cast<const float*>(nullptr), &factor}) {
    std::vector<float> got = y;
    add_scaled(ctx, {const_cast<float*>(x.data()), DType::f32, 2, 30, 32}, 0.3f,
               {got.data(), DType::f32, 2, 30, 32}, then);
    for (size_t i = 0; i < got.size(); ++i) {
      const float sum = y[i] + 0.3f * x[i];
      EXPECT(got[i] == (i % 32 >= 30 ? y[i] : then ? sum * factor : sum), "add_scaled");
    }
  }
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
                       {"norm", [] { for_each_isa(check_norm); }},
                       {"gate", [] { for_each_isa(check_gate); }},
                       {"scaled_add", check_scaled_add},
                   },
                   &failures);
}
