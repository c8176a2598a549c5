// Norm, embedding and the work on rows against loops in double and the CPU's op, in the emulator
// or, with "--gpu", on a real one. Outputs are poisoned; strides leave room between rows.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "core/error.h"
#include "cuda/dispatch.h"
#include "cuda/emulator.h"
#include "ops/embedding_cuda.h"
#include "ops/gate_kernels.h"
#include "ops/norm.h"
#include "ops/norm_kernels.h"
#include "ops/rows_cuda.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"
#include "tests/cuda/gpu_array.h"

namespace turbomind {

TM_GPU_TABLE(NormCuda, kNormCuda, norm_cuda)
TM_GPU_TABLE(EmbeddingCuda, kEmbeddingCuda, embedding_cuda)
TM_GPU_TABLE(GateCuda, kGateCuda, gate_cuda)
TM_GPU_TABLE(RowsCuda, kRowsCuda, rows_cuda)

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

float read_16(DType t, uint16_t bits) {
  return t == DType::bf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

// Half an ulp of the type, relative.
double rounding(DType t) {
  return t == DType::f32 ? 0x1p-24 : t == DType::bf16 ? 0x1p-8 : 0x1p-11;
}

bool near(double got, double want, double relative, double absolute) {
  return std::fabs(got - want) <= relative * std::fabs(want) + absolute;  // false for NaN
}

struct Bench {
  Gpu& gpu;
  GpuStream stream;
  explicit Bench(Gpu& g) : gpu(g), stream(g) {}

  // Runs `launch`; in the emulator the bytes that `kernel` moved are the expected ones.
  template <typename Launch>
  void run(const char* kernel, int64_t loaded, int64_t stored, Launch&& launch) {
    emulator::reset_counters();
    gpu.make_current();
    launch(stream.handle());
    stream.synchronize();
    if (gpu.kind() != GpuKind::emulated) return;
    const emulator::LaunchCounters c = emulator::counters(kernel);
    EXPECT(c.bytes_loaded == loaded && c.bytes_stored == stored,
           std::string(kernel) + ": " + std::to_string(c.bytes_loaded) + " bytes loaded, " +
               std::to_string(c.bytes_stored) + " stored, expected " + std::to_string(loaded) +
               " and " + std::to_string(stored));
  }
};

struct NormCase {
  int rows, cols, padded, x_stride, y_stride;
};

// Element (r, c) of a result of any type.
struct Result {
  DType dtype;
  std::vector<uint16_t> bits;  // float32 takes two
  float at(size_t i) const {
    if (dtype != DType::f32) return read_16(dtype, bits[i]);
    float v;
    std::memcpy(&v, &bits[2 * i], 4);
    return v;
  }
  bool poison(size_t i) const {
    return dtype == DType::f32 ? bits[2 * i] == 0xffff && bits[2 * i + 1] == 0xffff
                               : bits[i] == 0xffff;
  }
};

Result run_norm(Bench& b, const NormCase& c, DType dtype, const std::vector<float>& x,
                const std::vector<float>& weight) {
  const size_t words = dtype_bytes(dtype) / 2;
  const GpuArray<float> dx(b.gpu, x), dw(b.gpu, weight);
  const GpuArray<uint16_t> dy(b.gpu, static_cast<size_t>(c.rows) * c.y_stride * words);
  DeviceNorm n;
  n.x = dx.data();
  n.y = dy.data();
  if (!weight.empty()) n.weight = dw.data();
  n.x_stride = c.x_stride;
  n.y_stride = c.y_stride;
  n.rows = c.rows;
  n.cols = c.cols;
  n.padded = c.padded;
  n.weight_offset = weight.empty() ? 0 : 1;
  n.eps = 1e-5f;
  n.y_dtype = dtype;
  b.run(c.cols > 4096 ? "rms_norm_wide_rows" : "rms_norm_rows",
        norm_bytes_loaded(n) / (weight.empty() ? 2 : 1), norm_bytes_stored(n),
        [&](StreamHandle s) { norm_cuda(b.gpu.kind()).rms_norm(s, n); });
  return {dtype, dy.get()};
}

void check_norm(Bench& b, const NormCase& c, DType dtype) {
  char name[100];
  std::snprintf(name, sizeof name, "norm %s [%d, %d -> %d] strides %d %d", dtype_name(dtype),
                c.rows, c.cols, c.padded, c.x_stride, c.y_stride);
  const auto x = random_floats(static_cast<size_t>(c.rows) * c.x_stride, 3, 2.0f);
  const auto weight = random_floats(c.cols, 4, 0.5f);
  const Result y = run_norm(b, c, dtype, x, weight);

  Profiler profiler;
  ThreadPool pool(1);
  Context ctx{pool, Isa::portable, profiler};
  std::vector<float> cpu(static_cast<size_t>(c.rows) * c.cols);
  rms_norm(ctx, {NormKind::rms, 1e-5f, 1, weight.data()},
           {const_cast<float*>(x.data()), DType::f32, c.rows, c.cols, c.x_stride},
           {cpu.data(), DType::f32, c.rows, c.cols, c.cols});

  for (int r = 0; r < c.rows; ++r) {
    double squares = 0;
    for (int i = 0; i < c.cols; ++i) {
      const double v = x[static_cast<size_t>(r) * c.x_stride + i];
      squares += v * v;
    }
    const double scale = 1 / std::sqrt(squares / c.cols + 1e-5);
    for (int i = 0; i < c.y_stride; ++i) {
      const size_t at = static_cast<size_t>(r) * c.y_stride + i;
      if (i >= c.padded) {
        EXPECT(y.poison(at), std::string(name) + ": wrote after the padding");
      } else if (i >= c.cols) {
        EXPECT(y.at(at) == 0, std::string(name) + ": padding is not zero");
      } else {
        const double v = x[static_cast<size_t>(r) * c.x_stride + i];
        const double want = v * scale * (static_cast<double>(weight[i]) + 1);
        const double bound = rounding(dtype) * 1.001 + 1e-6;
        EXPECT(near(y.at(at), want, bound, 1e-7), std::string(name) + ": differs from double");
        EXPECT(near(y.at(at), cpu[static_cast<size_t>(r) * c.cols + i], bound, 1e-7),
               std::string(name) + ": differs from the CPU's");
      }
    }
  }
  // The last row alone has the same bits.
  NormCase alone = c;
  alone.rows = 1;
  const std::vector<float> last(x.end() - c.x_stride, x.end());
  const Result one = run_norm(b, alone, dtype, last, weight);
  EXPECT(std::equal(one.bits.begin(), one.bits.end(), y.bits.end() - one.bits.size()),
         std::string(name) + ": a row alone has other bits");
}

// Without a weight a row is converted.
void check_conversion(Bench& b, const NormCase& c, DType dtype) {
  const auto x = random_floats(static_cast<size_t>(c.rows) * c.x_stride, 3, 2.0f);
  const Result y = run_norm(b, c, dtype, x, {});
  for (int r = 0; r < c.rows; ++r)
    for (int i = 0; i < c.padded; ++i) {
      const double want = i < c.cols ? x[static_cast<size_t>(r) * c.x_stride + i] : 0;
      EXPECT(near(y.at(static_cast<size_t>(r) * c.y_stride + i), want, rounding(dtype), 1e-7),
             "a norm without a weight changes values");
    }
}

// act(gate) * up against doubles.
void check_gate(Bench& b, Epilogue epilogue, DType dtype, int rows, int cols) {
  const int padded = (cols + 31) / 32 * 32, up_stride = 3 * cols;
  const auto gate = random_floats(static_cast<size_t>(rows) * padded, 5, 2.0f);
  const auto up = random_floats(static_cast<size_t>(rows) * up_stride, 6, 1.0f);
  const GpuArray<float> dg(b.gpu, gate), du(b.gpu, up);
  const size_t words = dtype_bytes(dtype) / 2;
  const GpuArray<uint16_t> dy(b.gpu, static_cast<size_t>(rows) * padded * words);
  DeviceGate g;
  g.gate = dg.data();
  g.up = du.data();
  g.y = dy.data();
  g.gate_stride = g.y_stride = padded;
  g.up_stride = up_stride;
  g.rows = rows;
  g.cols = cols;
  g.padded = padded;
  g.epilogue = epilogue;
  g.y_dtype = dtype;
  const int64_t elements = int64_t{rows} * cols;
  b.run("multiply_gate_rows", 8 * elements,
        int64_t{rows} * padded * static_cast<int64_t>(dtype_bytes(dtype)),
        [&](StreamHandle s) { gate_cuda(b.gpu.kind()).multiply(s, g); });
  const Result y{dtype, dy.get()};
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < padded; ++c) {
      const double x = gate[static_cast<size_t>(r) * padded + c];
      const double u = std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
      const double active =
          epilogue == Epilogue::silu_mul ? x / (1 + std::exp(-x)) : 0.5 * x * (1 + std::tanh(u));
      const double want = c < cols ? active * up[static_cast<size_t>(r) * up_stride + c] : 0;
      EXPECT(near(y.at(static_cast<size_t>(r) * padded + c), want, rounding(dtype) + 4e-6, 1e-6),
             "gate: a wrong element");
    }
}

void check_gates(Bench& b) {
  for (const Epilogue epilogue : {Epilogue::silu_mul, Epilogue::gelu_mul})
    for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
      check_gate(b, epilogue, t, 3, 256);
      check_gate(b, epilogue, t, 2, 23);
      check_gate(b, epilogue, t, 1, 1100);
    }
}

void test_norm(Bench& b) {
  const NormCase cases[] = {
      {1, 8, 32, 8, 32},       {3, 64, 64, 64, 64},         {2, 100, 128, 101, 130},
      {4, 333, 352, 335, 353}, {3, 4096, 4096, 4096, 4096}, {1, 8192, 8192, 8192, 8192},
      {2, 1, 1, 3, 2}};
  for (const NormCase& c : cases)
    for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
      check_norm(b, c, t);
      check_conversion(b, c, t);
    }
  DeviceNorm wide;
  wide.rows = 1;
  wide.cols = wide.padded = kMaxNormCols + 1;
  wide.x_stride = wide.y_stride = wide.cols;
  bool refused = false;
  try {
    norm_cuda(b.gpu.kind()).rms_norm(nullptr, wide);
  } catch (const Error&) {
    refused = true;
  }
  EXPECT(refused, "norm: took a row that is too wide");
}

void check_embedding(Bench& b, DType dtype, int cols, int y_stride) {
  constexpr int kVocab = 37;
  const int table_stride = (cols + 31) / 32 * 32;
  std::vector<uint16_t> table(static_cast<size_t>(kVocab) * table_stride, 0);
  const auto values = random_floats(table.size(), 7, 1.0f);
  for (int v = 0; v < kVocab; ++v)
    for (int c = 0; c < cols; ++c) {
      const size_t at = static_cast<size_t>(v) * table_stride + c;
      table[at] = dtype == DType::bf16 ? f32_to_bf16(values[at]) : f32_to_f16(values[at]);
    }
  const std::vector<int32_t> ids = {5, 0, kVocab - 1, -1, kVocab, 5};
  const GpuArray<uint16_t> dt(b.gpu, table);
  const GpuArray<int32_t> di(b.gpu, ids);
  const GpuArray<float> dy(b.gpu, ids.size() * y_stride);
  DeviceEmbedding e;
  e.table = dt.data();
  e.ids = di.data();
  e.y = dy.data();
  e.table_stride = table_stride;
  e.y_stride = y_stride;
  e.rows = static_cast<int32_t>(ids.size());
  e.cols = cols;
  e.vocab = kVocab;
  e.scale = 1.7f;
  e.dtype = dtype;
  // Every thread of a block reads the id; two of the rows are out of the table.
  const int64_t loaded = e.rows * 256 * 4 + 4 * ((cols + 3) / 4 * 8);
  b.run("embed_rows", loaded, int64_t{e.rows} * cols * 4,
        [&](StreamHandle s) { embedding_cuda(b.gpu.kind()).embed(s, e); });
  const auto y = dy.get();
  for (size_t r = 0; r < ids.size(); ++r)
    for (int c = 0; c < y_stride; ++c) {
      const float got = y[r * y_stride + c];
      const bool known = ids[r] >= 0 && ids[r] < kVocab;
      const float want =
          known && c < cols
              ? read_16(dtype, table[static_cast<size_t>(ids[r]) * table_stride + c]) * 1.7f
              : 0.0f;
      EXPECT(c < cols ? got == want : std::isnan(got), "embedding: a wrong element");
    }
}

void check_gather(Bench& b, int words, int stride) {
  std::vector<uint16_t> x(static_cast<size_t>(9) * stride);
  std::mt19937 gen(1 + test_seed);
  for (uint16_t& v : x) v = static_cast<uint16_t>(gen());
  const std::vector<int32_t> rows = {8, 0, -1, 3, 3};
  const GpuArray<uint16_t> dx(b.gpu, x);
  const GpuArray<int32_t> dr(b.gpu, rows);
  const GpuArray<uint16_t> dy(b.gpu, rows.size() * stride);
  DeviceGather g;
  g.x = dx.data();
  g.rows = dr.data();
  g.y = dy.data();
  g.x_stride = g.y_stride = 2 * stride;
  g.row_bytes = 2 * words;
  g.count = static_cast<int32_t>(rows.size());
  b.run("gather_rows", g.count * 256 * 4 + int64_t{4} * g.row_bytes, int64_t{g.count} * g.row_bytes,
        [&](StreamHandle s) { rows_cuda(b.gpu.kind()).gather(s, g); });
  const auto y = dy.get();
  for (size_t r = 0; r < rows.size(); ++r)
    for (int c = 0; c < stride; ++c) {
      const uint16_t inside = rows[r] < 0 ? 0 : x[static_cast<size_t>(rows[r]) * stride + c];
      EXPECT(y[r * stride + c] == (c < words ? inside : 0xffff), "gather: a wrong element");
    }
}

void check_elementwise(Bench& b, int rows, int cols, int stride) {
  const size_t size = static_cast<size_t>(rows) * stride;
  const auto x = random_floats(size, 11, 3.0f), y = random_floats(size, 12, 3.0f);
  GpuArray<float> dx(b.gpu, x);
  const GpuArray<float> dy(b.gpu, y);
  const int64_t bytes = int64_t{4} * rows * cols;
  const GpuArray<float> factor(b.gpu, std::vector<float>{1.7f});
  const int64_t threads = int64_t{rows} * ((cols + 3) / 4);  // each loads the factor
  std::vector<float> out;
  for (const bool scaled : {false, true}) {
    dx.set(x);
    b.run("scaled_add_rows", 2 * bytes + (scaled ? 4 * threads : 0), bytes, [&](StreamHandle s) {
      rows_cuda(b.gpu.kind())
          .scaled_add(s, {dx.data(), dy.data(), stride, stride, rows, cols, 0.3f,
                          scaled ? factor.data() : nullptr});
    });
    out = dx.get();
    for (size_t i = 0; i < size; ++i) {
      const bool inside = static_cast<int>(i) % stride < cols;
      const float sum = std::fma(0.3f, y[i], x[i]);
      EXPECT(out[i] == (!inside ? x[i] : scaled ? sum * 1.7f : sum), "scaled add: a wrong element");
    }
  }
  for (const float cap : {2.5f, 0.0f}) {
    dx.set(x);
    b.run("scale_and_cap_rows", bytes, bytes, [&](StreamHandle s) {
      rows_cuda(b.gpu.kind()).scale_and_cap(s, {dx.data(), stride, rows, cols, 0.75f, cap});
    });
    out = dx.get();
    for (size_t i = 0; i < size; ++i) {
      const bool inside = static_cast<int>(i) % stride < cols;
      const double expected = cap != 0 ? cap * std::tanh(0.75 * x[i] / cap) : 0.75 * x[i];
      EXPECT(inside ? near(out[i], expected, 1e-6, 0) : out[i] == x[i],
             "scale_and_cap: a wrong element");
    }
  }
}

void check_embeddings(Bench& b) {
  for (const DType t : {DType::bf16, DType::f16}) {
    check_embedding(b, t, 64, 64);
    check_embedding(b, t, 99, 101);
    check_embedding(b, t, 2048, 2048);
  }
}

void check_gathers(Bench& b) {
  check_gather(b, 128, 128);
  check_gather(b, 100, 104);
  check_gather(b, 7, 9);
}

void check_elementwise(Bench& b) {
  check_elementwise(b, 3, 64, 64);
  check_elementwise(b, 2, 1111, 1117);
  check_elementwise(b, 1, 4099, 4100);
}

// Runs `check` on a GPU of its own.
void on_gpu(void (*check)(Bench&)) {
  const auto gpu = open_gpu(kind(), 0);
  Bench b(*gpu);
  check(b);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv),
                   {
                       {"norm", [] { on_gpu(test_norm); }},
                       {"embedding", [] { on_gpu(check_embeddings); }},
                       {"gate", [] { on_gpu(check_gates); }},
                       {"gather", [] { on_gpu(check_gathers); }},
                       {"elementwise", [] { on_gpu(check_elementwise); }},
                   },
                   &failures);
}
