// Products on the GPU, in emulation: against a double loop and the CPU's op; one row's bits on
// every path and in any company; bytes moved against the model; cuBLASLt through a stand-in, whose
// folder is the argument (default: beside this program).
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/memory.h"
#include "cuda/cublaslt.h"
#include "cuda/emulator.h"
#include "ops/linear.h"
#include "quant/linear_cuda.h"

namespace turbomind {
namespace {

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (ok) return;
  if (++failures <= 40) std::fprintf(stderr, "FAILED %s\n", what.c_str());
}

// Device memory of the emulator: the host's, of exactly the bytes asked for.
class Bytes {
 public:
  explicit Bytes(size_t size) : size_(size) {
    void* p = nullptr;
    if (posix_memalign(&p, 256, std::max<size_t>(size, 1)) != 0) std::abort();
    data_.reset(static_cast<uint8_t*>(p));
    std::memset(p, 0xff, size);
  }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  size_t size_;
  std::unique_ptr<uint8_t, Free> data_;
};

float get16(DType t, uint16_t h) {
  return t == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
}
uint16_t put16(DType t, float v) {
  return t == DType::f16 ? f32_to_f16(v) : f32_to_bf16(v);
}

struct Case {
  DType dtype = DType::bf16;
  int m = 1, n = 16, k = 32;
  Epilogue epilogue = Epilogue::store;
  bool y_16bit = false, bias = false, addend = false;
  int cut = 0;  // columns of y less than n / 2, for silu_mul

  std::string text() const {
    return std::string(dtype_name(dtype)) + " m " + std::to_string(m) + " n " + std::to_string(n) +
           " k " + std::to_string(k) + " epilogue " + std::to_string(static_cast<int>(epilogue)) +
           (y_16bit ? " y 16 bit" : "") + (bias ? " bias" : "") + (addend ? " addend" : "") +
           (cut ? " cut" : "");
  }
  bool gated() const { return epilogue == Epilogue::silu_mul; }
  int y_cols() const { return gated() ? n / 2 - cut : n; }
};

constexpr float kBefore = 0.25f;  // y before Epilogue::add

// The operands of a case and their exact sums.
struct Problem {
  Case c;
  int k_padded, x_stride, y_stride, y_zero_end;
  std::vector<float> w_values, x_values;
  Bytes w, x, bias, addend;
  std::vector<double> raw, sums, magnitudes;  // [m][n]; sums: bias and addend included

  Problem(const Case& c, unsigned seed)
      : c(c),
        k_padded(static_cast<int>(padded_cols(c.k))),
        x_stride(k_padded + 8),
        y_stride(static_cast<int>(padded_cols(c.y_cols())) + 3),
        y_zero_end(static_cast<int>(padded_cols(c.y_cols()))),
        w_values(c.n * c.k),
        x_values(c.m * c.k),
        w(size_t(c.n) * k_padded * 2),
        x((size_t(c.m - 1) * x_stride + k_padded) * 2),
        bias(size_t(c.n) * 4),
        addend(size_t(c.m) * (c.n + 1) * 4) {
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    fill16(w_values, w, c.n, k_padded, rng);
    fill16(x_values, x, c.m, x_stride, rng);
    for (int i = 0; i < c.n; ++i) bias.as<float>()[i] = normal(rng);
    for (int i = 0; i < c.m * (c.n + 1); ++i) addend.as<float>()[i] = normal(rng);
    add_up();
  }

  // Rounded values, zeros up to k_padded, NaN behind.
  void fill16(std::vector<float>& values, Bytes& to, int rows, int stride, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    for (int r = 0; r < rows; ++r) {
      for (int i = 0; i < k_padded; ++i) {
        const uint16_t h = i < c.k ? put16(c.dtype, normal(rng)) : 0;
        to.as<uint16_t>()[r * stride + i] = h;
        if (i < c.k) values[r * c.k + i] = get16(c.dtype, h);
      }
    }
  }
  void add_up() {
    sums.resize(c.m * c.n);
    raw.resize(sums.size());
    magnitudes.resize(sums.size());
    for (int r = 0; r < c.m; ++r) {
      for (int j = 0; j < c.n; ++j) {
        double sum = 0, magnitude = 1;
        for (int i = 0; i < c.k; ++i) {
          const double p = double(x_values[r * c.k + i]) * w_values[j * c.k + i];
          sum += p;
          magnitude += std::fabs(p);
        }
        raw[r * c.n + j] = sum;
        if (c.bias) sum += bias.as<float>()[j];
        if (c.addend) sum += addend.as<float>()[r * (c.n + 1) + j];
        sums[r * c.n + j] = sum;
        magnitudes[r * c.n + j] = magnitude;
      }
    }
  }

  DeviceProduct product() const {
    DeviceProduct p;
    p.w = w.as<void>();
    p.x = x.as<void>();
    p.bias = c.bias ? bias.as<float>() : nullptr;
    p.addend = c.addend ? addend.as<float>() : nullptr;
    p.x_stride = x_stride;
    p.y_stride = y_stride;
    p.addend_stride = c.n + 1;
    p.m = c.m, p.n = c.n, p.k_padded = k_padded;
    p.y_cols = c.y_cols();
    p.y_zero_end = y_zero_end;
    p.dtype = c.dtype;
    p.y_16bit = c.y_16bit;
    p.epilogue = c.epilogue;
    return p;
  }
  DeviceProduct rows(int begin, int end) const {
    DeviceProduct p = product();
    p.x = x.as<uint16_t>() + begin * x_stride;
    if (p.addend != nullptr) p.addend += begin * p.addend_stride;
    p.m = end - begin;
    return p;
  }
};

// An output, poisoned; what Epilogue::add adds to is set.
struct Output {
  DeviceProduct p;
  Bytes memory;

  explicit Output(const DeviceProduct& product)
      : p(product), memory(size_t(product.m) * row_bytes(product)) {
    p.y = memory.as<void>();
    for (int r = 0; p.epilogue == Epilogue::add && r < p.m; ++r)
      for (int j = 0; j < p.y_cols; ++j) memory.as<float>()[r * p.y_stride + j] = kBefore;
  }
  static size_t row_bytes(const DeviceProduct& p) { return p.y_stride * (p.y_16bit ? 2 : 4); }
  float at(int r, int j) const {
    const int64_t i = r * p.y_stride + j;
    return p.y_16bit ? get16(p.dtype, memory.as<uint16_t>()[i]) : memory.as<float>()[i];
  }
  bool same_rows(int row, const Output& other, int other_row, int rows) const {
    const size_t bytes = row_bytes(p);
    return std::memcmp(memory.as<uint8_t>() + row * bytes,
                       other.memory.as<uint8_t>() + other_row * bytes, rows * bytes) == 0;
  }
};

// ---- one path

struct Path {
  std::string name;
  int row_tiles = 0;  // 0: the tiled kernel
  int multiprocessors = 1;
  int stages = 2;
  int columns = 0;
};

Path skinny_path(int row_tiles, int multiprocessors, int stages) {
  return {"skinny " + std::to_string(row_tiles) + " tiles, " + std::to_string(multiprocessors) +
              " blocks, " + std::to_string(stages) + " stages",
          row_tiles, multiprocessors, stages, 0};
}
Path gemm_path(int columns) {
  return {"gemm by " + std::to_string(columns), 0, 1, 0, columns};
}

size_t shared_for(int row_tiles, int stages) {
  return kSkinnySumBytes + size_t(stages) * kSlots * (kTileGroups + 2 * row_tiles) * kPieceBytes;
}

bool takes(const Path& path, int m) {
  return path.row_tiles == 0 || m <= 16 * path.row_tiles;
}

Output run(const DeviceProduct& product, const Path& path) {
  Output y(product);
  emulator::reset_counters();
  LinearTraffic model;
  if (path.row_tiles == 0) {
    cuda_emulated::kGemmCuda.run(nullptr, y.p, path.columns);
    model = gemm_traffic(y.p, path.columns);
  } else {
    SkinnyPlan plan = skinny_plan(y.p, path.multiprocessors, size_t{1} << 20);
    plan.row_tiles = path.row_tiles;
    plan.stages = path.stages;
    plan.shared_bytes = shared_for(path.row_tiles, path.stages);
    cuda_emulated::kLinearCuda.skinny(nullptr, y.p, plan);
    model = skinny_traffic(y.p, plan);
  }
  const emulator::LaunchCounters seen = emulator::counters(path.row_tiles == 0 ? "gemm" : "skinny");
  expect(seen.bytes_loaded == model.loaded && seen.bytes_stored == model.stored,
         path.name + ": loaded " + std::to_string(seen.bytes_loaded) + " of " +
             std::to_string(model.loaded) + ", stored " + std::to_string(seen.bytes_stored) +
             " of " + std::to_string(model.stored));
  return y;
}

// ---- values

struct Expected {
  double value, bound;
};

// `sum_error`: relative, of a sum that is rounded on the way.
Expected expected(const Problem& p, int r, int j, double sum_error) {
  const Case& c = p.c;
  const double y_eps = !c.y_16bit ? 1e-6 : c.dtype == DType::bf16 ? 1.0 / 256 : 1.0 / 2048;
  const auto at = [&](int col) { return r * c.n + col; };
  if (!c.gated()) {
    const double want = p.sums[at(j)] + (c.epilogue == Epilogue::add ? kBefore : 0);
    return {want, 2e-6 * p.magnitudes[at(j)] + y_eps * std::fabs(want)};
  }
  const int col = j / 16 * 32 + j % 16;
  const double gate = p.sums[at(col)], up = p.sums[at(col + 16)];
  const double want = gate / (1 + std::exp(-gate)) * up;
  const double gate_error = 2e-6 * p.magnitudes[at(col)] + sum_error * std::fabs(p.raw[at(col)]);
  const double up_error =
      2e-6 * p.magnitudes[at(col + 16)] + sum_error * std::fabs(p.raw[at(col + 16)]);
  return {want, 1.1 * std::fabs(up) * gate_error + std::fabs(gate) * up_error +
                    gate_error * up_error + (y_eps + 1e-6) * std::fabs(want) + 1e-7};
}

void check_values(const Problem& p, const Output& y, const std::string& path, double sum_error) {
  for (int r = 0; r < p.c.m; ++r) {
    for (int j = 0; j < p.c.y_cols(); ++j) {
      const Expected e = expected(p, r, j, sum_error);
      if (!(std::fabs(y.at(r, j) - e.value) <= e.bound)) {
        return expect(false, path + ", " + p.c.text() + " at " + std::to_string(r) + "," +
                                 std::to_string(j) + ": " + std::to_string(y.at(r, j)) + " not " +
                                 std::to_string(e.value));
      }
    }
    for (int j = p.c.y_cols(); j < p.y_stride; ++j) {
      const bool zero = j < p.y_zero_end;
      expect(zero ? y.at(r, j) == 0 : std::isnan(y.at(r, j)),
             path + ", " + p.c.text() + ": column " + std::to_string(j) + " behind the last");
    }
  }
}

// The CPU's op on the same operands, in float32.
std::vector<float> on_cpu(const Problem& p, ThreadPool& pool) {
  const Case& c = p.c;
  const bool bf16 = c.dtype == DType::bf16;
  const WeightFormat& format = weight_format(bf16 ? "bfloat16" : "float16");
  HugeBuffer packed(format.packed_bytes(c.n, c.k));
  format.pack(pool, {{p.w_values.data(), DType::f32, 0, c.n, c.k}}, c.n, c.k, packed.data());
  const LinearWeight weight{&format, c.n, c.k, packed.data(), packed.size()};
  std::vector<float> x(size_t(c.m) * p.k_padded), y(size_t(c.m) * p.y_zero_end, kBefore);
  std::vector<uint16_t> x16(x.size());
  for (int r = 0; r < c.m; ++r) {
    for (int i = 0; i < c.k; ++i) {
      x[r * p.k_padded + i] = p.x_values[r * c.k + i];
      x16[r * p.k_padded + i] = f32_to_bf16(p.x_values[r * c.k + i]);
    }
  }
  const Mat x_mat = bf16 ? Mat{x16.data(), DType::bf16, c.m, c.k, p.k_padded}
                         : Mat{x.data(), DType::f32, c.m, c.k, p.k_padded};
  const Mat y_mat{y.data(), DType::f32, c.m, c.y_cols(), p.y_zero_end};
  const Mat addend{p.addend.as<float>(), DType::f32, c.m, c.n, c.n + 1};
  Profiler profiler;
  Context ctx{pool, best_isa(), profiler};
  linear(ctx, Op::other, weight, x_mat, y_mat,
         {c.bias ? p.bias.as<float>() : nullptr, c.addend ? &addend : nullptr, c.epilogue});
  return y;
}

void check_against_cpu(const Problem& p, const Output& y, ThreadPool& pool) {
  const std::vector<float> cpu = on_cpu(p, pool);
  for (int r = 0; r < p.c.m; ++r) {
    for (int j = 0; j < p.c.y_cols(); ++j) {
      const Expected e = expected(p, r, j, 0);
      const float other = cpu[r * p.y_zero_end + j];
      if (!(std::fabs(y.at(r, j) - other) <= 2 * e.bound)) {
        return expect(false, p.c.text() + " at " + std::to_string(r) + "," + std::to_string(j) +
                                 ": " + std::to_string(y.at(r, j)) + ", the CPU's op " +
                                 std::to_string(other));
      }
    }
  }
}

// ---- cases

std::vector<Case> cases() {
  const int shapes[][2] = {{1, 1}, {40, 33}, {97, 129}, {160, 290}, {67, 1090}};
  const Epilogue epilogues[] = {Epilogue::store, Epilogue::add, Epilogue::silu_mul};
  std::vector<Case> all;
  int turn = 0;
  for (const int m : {1, 2, 7, 15, 16, 17, 33, 64, 128, 200}) {
    for (const auto& shape : shapes) {
      if (m > 64 && shape[0] * shape[1] > 20000) continue;
      Case c;
      c.dtype = turn % 2 ? DType::f16 : DType::bf16;
      c.m = m;
      c.n = shape[0];
      c.k = shape[1];
      c.epilogue = epilogues[turn / 2 % 3];
      c.y_16bit = c.epilogue != Epilogue::add && turn / 3 % 2;
      c.bias = turn / 5 % 2;
      c.addend = turn / 7 % 2;
      if (c.gated()) {
        c.n = static_cast<int>(round_up(c.n, 32));
        c.cut = turn % 4 * 5;
      }
      all.push_back(c);
      ++turn;
    }
  }
  return all;
}

// Every way to the same bits.
std::vector<Path> paths(int turn) {
  return {skinny_path(1, 1 + turn % 4, 2 + turn % 4), skinny_path(2, 132, 4),
          skinny_path(4, 2, 2 + turn % 2), gemm_path(128), gemm_path(64)};
}

void check_parts(const Problem& p, const Output& whole, const std::vector<Path>& all, int turn) {
  const int m = p.c.m, row = turn % m, begin = m / 2, end = std::min(m, begin + 1 + turn % 20);
  const Path& path = all[turn % all.size()];
  const Output alone = run(p.rows(row, row + 1), path);
  expect(alone.same_rows(0, whole, row, 1), path.name + ", " + p.c.text() + ": a row alone");
  for (const Path& other : all) {
    if (!takes(other, end - begin)) continue;
    const Output part = run(p.rows(begin, end), other);
    return expect(part.same_rows(0, whole, begin, end - begin),
                  other.name + ", " + p.c.text() + ": a part of the rows");
  }
}

void check_cases() {
  ThreadPool pool(1);
  int turn = 0;
  for (const Case& c : cases()) {
    const Problem p(c, 1 + turn);
    const std::vector<Path> all = paths(turn);
    std::unique_ptr<Output> first;
    for (size_t i = 0; i < all.size(); ++i) {
      // All ways for few rows; for many, those that a step would take.
      if (!takes(all[i], c.m) || (c.m > 64 && int(i) % 2 != turn % 2)) continue;
      Output y = run(p.product(), all[i]);
      if (first == nullptr) {
        first = std::make_unique<Output>(std::move(y));
        check_values(p, *first, all[i].name, 0);
        check_against_cpu(p, *first, pool);
        continue;
      }
      expect(y.same_rows(0, *first, 0, c.m), all[i].name + ", " + c.text() + ": other bits");
    }
    check_parts(p, *first, all, turn);
    ++turn;
  }
}

// ---- choice and checks

void check_choice() {
  const auto is = [](LinearPath path, int m, bool deterministic, bool cublaslt, int rows) {
    expect(linear_path(m, deterministic, cublaslt, rows) == path,
           "path of " + std::to_string(m) + " rows");
  };
  for (const bool deterministic : {false, true}) {
    for (const bool cublaslt : {false, true}) {
      const bool library = cublaslt && !deterministic;
      is(LinearPath::skinny, 1, deterministic, cublaslt, 64);
      is(LinearPath::skinny, 16, deterministic, cublaslt, 64);
      is(library ? LinearPath::cublaslt : LinearPath::skinny, 17, deterministic, cublaslt, 64);
      is(library ? LinearPath::cublaslt : LinearPath::skinny, 64, deterministic, cublaslt, 64);
      is(library ? LinearPath::cublaslt : LinearPath::gemm, 65, deterministic, cublaslt, 64);
      is(library ? LinearPath::cublaslt : LinearPath::gemm, 17, deterministic, cublaslt, 16);
    }
  }
  constexpr size_t kHopper = 227 << 10, kAmpere = 163 << 10, kAda = 99 << 10;
  expect(skinny_rows(kHopper) == 64 && skinny_rows(kAmpere) == 64 && skinny_rows(kAda) == 16,
         "rows of the skinny kernel");
  DeviceProduct p;
  p.m = 1, p.n = 4096;
  expect(skinny_plan(p, 132, kHopper).stages == 5, "stages on Hopper");
  p.m = 64;
  expect(skinny_plan(p, 132, kHopper).stages == 3, "stages on Hopper for 64 rows");
  expect(skinny_plan(p, 128, kAda).row_tiles == 0, "64 rows fit on Ada");
}

void check_refusals() {
  const Problem p({}, 1);
  Output y(p.product());
  DeviceLinear l;
  l.shared_per_block = emulator::kMaxSharedBytes;
  const auto refuses = [&](const char* what, auto change) {
    DeviceProduct bad = y.p;
    change(bad);
    try {
      linear(l, nullptr, bad);
      expect(false, std::string("accepted: ") + what);
    } catch (const Error& e) {
      expect(std::string(e.what()).find(what) != std::string::npos, e.what());
    }
  };
  refuses("k_padded is 40", [](DeviceProduct& b) { b.k_padded = 40; });
  refuses("x_stride is 24", [](DeviceProduct& b) { b.x_stride = 24; });
  refuses("y_cols is 15, expected n", [](DeviceProduct& b) { b.y_cols = 15; });
  refuses("n is 16, expected a positive multiple of 32",
          [](DeviceProduct& b) { b.epilogue = Epilogue::silu_mul; });
  refuses("y_16bit is 1", [](DeviceProduct& b) {
    b.epilogue = Epilogue::add;
    b.y_16bit = true;
  });
  refuses("expected a multiple of 16",
          [](DeviceProduct& b) { b.x = static_cast<const uint8_t*>(b.x) + 2; });
  y.p.m = 0;
  linear(l, nullptr, y.p);
}

// ---- cuBLASLt

struct Fake {
  int (*live)();
  int (*heuristics)();
  int (*products)();
  void (*behave)(int status_of_matmul, int algorithms_found);

  explicit Fake(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW);
    if (library == nullptr) {
      std::fprintf(stderr, "no stand-in for cuBLASLt: %s\n", dlerror());
      std::exit(2);
    }
    live = reinterpret_cast<int (*)()>(dlsym(library, "fake_live"));
    heuristics = reinterpret_cast<int (*)()>(dlsym(library, "fake_heuristics"));
    products = reinterpret_cast<int (*)()>(dlsym(library, "fake_products"));
    behave = reinterpret_cast<void (*)(int, int)>(dlsym(library, "fake_behave"));
  }
};

struct Library {
  Bytes workspace{1024};
  std::vector<std::string> said;
  std::unique_ptr<CublasLt> lt;

  explicit Library(const std::string& folder) {
    std::string why;
    lt = CublasLt::open(
        {"/nowhere", folder}, workspace.as<void>(), workspace.size(),
        [this](const std::string& text) { said.push_back(text); }, &why);
    expect(lt != nullptr, why);
  }
};

double rounding(DType t) {
  return t == DType::bf16 ? 1.0 / 256 : 1.0 / 2048;
}

// Values of all epilogues through the library, or through ours where it does not take them.
void check_library_values(const Fake& fake, const std::string& folder) {
  const Library library(folder);
  DeviceLinear l;
  l.shared_per_block = emulator::kMaxSharedBytes;
  l.cublaslt = library.lt.get();
  for (const Case& c : cases()) {
    if (c.m < 15 || c.m > 128) continue;
    const Problem p(c, 7);
    // Room for 33 rows: the products of more go in pieces.
    const Bytes scratch(gate_scratch_bytes(33, c.n));
    l.scratch = scratch.as<void>();
    l.scratch_bytes = scratch.size();
    Output y(p.product());
    const int before = fake.products();
    linear(l, nullptr, y.p);
    const bool taken = c.m > kSkinnyRows && !(c.y_16bit && !c.gated() && (c.bias || c.addend));
    const int pieces = !taken ? 0 : c.gated() ? (c.m + 32) / 33 : 1;
    expect(fake.products() - before == pieces, c.text() + ": products of the library");
    check_values(p, y, "cuBLASLt", taken ? rounding(c.dtype) : 0);
    l.deterministic = true;
    Output ours(p.product());
    linear(l, nullptr, ours.p);
    expect(fake.products() - before == pieces, c.text() + ": the library in deterministic mode");
    l.deterministic = false;
  }
  expect(library.said.empty(), "said without a failure");
}

void check_library_failures(const Fake& fake, const std::string& folder) {
  Case c;
  c.m = 33;
  const Problem p(c, 3);
  DeviceLinear l;
  l.shared_per_block = emulator::kMaxSharedBytes;
  const Path path = skinny_path(4, 1, 2);
  const Output want = run(p.product(), path);
  const auto multiply = [&](Library& library) {
    l.cublaslt = library.lt.get();
    Output y(p.product());
    linear(l, nullptr, y.p);
    return y;
  };
  {
    Library library(folder);
    const int plans = fake.heuristics();
    fake.behave(0, 0);
    for (int i = 0; i < 3; ++i) expect(multiply(library).same_rows(0, want, 0, c.m), "no plan");
    fake.behave(0, 1);
    expect(fake.heuristics() - plans == 1, "a shape without a plan is asked for again");
    expect(library.said.size() == 1 && library.said[0].find("33 rows, n 16") != std::string::npos,
           "said about a missing plan");
  }
  {
    Library library(folder);
    multiply(library);
    const int products = fake.products();
    fake.behave(13, 1);
    expect(multiply(library).same_rows(0, want, 0, c.m), "a failing product");
    fake.behave(0, 1);
    expect(multiply(library).same_rows(0, want, 0, c.m), "after a failing product");
    expect(fake.products() == products, "a library that failed is used again");
    expect(library.said.size() == 1 && library.said[0].find("status 13") != std::string::npos,
           "said about a failing product");
  }
  expect(fake.live() == 0, "objects of the library are left");
}

void check_library_missing() {
  namespace fs = std::filesystem;
  std::string pattern = (fs::temp_directory_path() / "cublaslt_XXXXXX").string();
  const fs::path folder = mkdtemp(pattern.data());
  std::ofstream(folder / CublasLt::library_names()[0]) << "not a library";
  std::string why;
  const auto lt = CublasLt::open({folder.string()}, nullptr, 0, nullptr, &why);
  // A system may have the real one; then there is nothing to say.
  expect(lt != nullptr || why.find(folder.string()) != std::string::npos, why);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  const std::string beside =
      (std::filesystem::path(argv[0]).parent_path() / "fake_cublaslt").string();
  const std::string folder = argc > 1 ? argv[1] : beside;
  check_cases();
  check_choice();
  check_refusals();
  const Fake fake(folder + "/" + CublasLt::library_names()[0]);
  check_library_values(fake, folder);
  check_library_failures(fake, folder);
  check_library_missing();
  std::printf(failures == 0 ? "ok\n" : "FAILED\n");
  return failures == 0 ? 0 : 1;
}
