// Products for the drivers of the GPU's linear op: operands with exact sums, outputs, bounds.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "cuda/emulator.h"
#include "cuda/gpu.h"
#include "linear/linear_cuda.h"
#include "tests/cuda/driver_gpu.h"

namespace turbomind {

inline int failures = 0;

inline void expect(bool ok, const std::string& what) {
  if (ok) return;
  if (++failures <= 40) std::fprintf(stderr, "FAILED %s\n", what.c_str());
}

// Host memory of exactly the bytes asked for, and its twin in device memory.
class Bytes {
 public:
  explicit Bytes(size_t size) : size_(size) {
    void* p = nullptr;
    if (posix_memalign(&p, 256, std::max<size_t>(size, 1)) != 0) std::abort();
    host_.reset(static_cast<uint8_t*>(p));
    std::memset(p, 0xff, size);
    if (real != nullptr) device_ = DeviceBuffer(*real, size);
    push();
  }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(host_.get());
  }
  template <typename T>
  T* device() const {
    return real != nullptr ? device_.as<T>() : as<T>();
  }
  size_t size() const { return size_; }
  void push() const { copy(device_.data(), host_.get()); }
  void pull() const { copy(host_.get(), device_.data()); }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  void copy(void* to, const void* from) const {
    if (real == nullptr) return;
    real->copy(nullptr, to, from, size_);
    real->synchronize(StreamHandle{});
  }
  size_t size_;
  std::unique_ptr<uint8_t, Free> host_;
  DeviceBuffer device_;
};

inline float get16(DType t, uint16_t h) {
  return t == DType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
}
inline uint16_t put16(DType t, float v) {
  return t == DType::f16 ? f32_to_f16(v) : f32_to_bf16(v);
}

struct Case {
  DType dtype = DType::bf16;
  int m = 1, n = 16, k = 32;
  Epilogue epilogue = Epilogue::store;
  bool y_16bit = false, bias = false, addend = false;
  int cut = 0;  // columns of y less than n / 2, where gated

  std::string text() const {
    return std::string(dtype_name(dtype)) + " m " + std::to_string(m) + " n " + std::to_string(n) +
           " k " + std::to_string(k) + " epilogue " + std::to_string(static_cast<int>(epilogue)) +
           (y_16bit ? " y 16 bit" : "") + (bias ? " bias" : "") + (addend ? " addend" : "") +
           (cut ? " cut" : "");
  }
  bool gated() const { return is_gated(epilogue); }
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
    std::mt19937 rng(seed + test_seed);
    std::normal_distribution<float> normal;
    fill16(w_values, w, c.n, k_padded, rng);
    fill16(x_values, x, c.m, x_stride, rng);
    for (int i = 0; i < c.n; ++i) bias.as<float>()[i] = normal(rng);
    for (int i = 0; i < c.m * (c.n + 1); ++i) addend.as<float>()[i] = normal(rng);
    add_up();
    for (const Bytes* b : {&w, &x, &bias, &addend}) b->push();
  }

  // Rounded values, zeros up to k_padded, NaN after that.
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
    p.w = w.device<void>();
    p.x = x.device<void>();
    p.bias = c.bias ? bias.device<float>() : nullptr;
    p.addend = c.addend ? addend.device<float>() : nullptr;
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
    p.x = x.device<uint16_t>() + begin * x_stride;
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
    p.y = memory.device<void>();
    for (int r = 0; p.epilogue == Epilogue::add && r < p.m; ++r)
      for (int j = 0; j < p.y_cols; ++j) memory.as<float>()[r * p.y_stride + j] = kBefore;
    memory.push();
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

// ---- values

struct Expected {
  double value, bound;
};

// What a gated epilogue makes of an up, and its activation of a gate, as published.
inline double up_term(Epilogue epilogue, double up) {
  return epilogue == Epilogue::swiglu_mul ? std::clamp(up, -7.0, 7.0) + 1 : up;
}
inline double activated(Epilogue epilogue, double gate) {
  if (epilogue == Epilogue::silu_mul) return gate / (1 + std::exp(-gate));
  if (epilogue == Epilogue::swiglu_mul) {
    gate = std::min(gate, 7.0);
    return gate / (1 + std::exp(-1.702 * gate));
  }
  return 0.5 * gate * (1 + std::tanh(std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate)));
}

// `sum_error`: relative, of a sum that is rounded on the way.
inline Expected expected(const Problem& p, int r, int j, double sum_error) {
  const Case& c = p.c;
  const double y_eps = !c.y_16bit ? 1e-6 : c.dtype == DType::bf16 ? 1.0 / 256 : 1.0 / 2048;
  const auto at = [&](int col) { return r * c.n + col; };
  if (!c.gated()) {
    const double want = p.sums[at(j)] + (c.epilogue == Epilogue::add ? kBefore : 0);
    return {want, 2e-6 * p.magnitudes[at(j)] + y_eps * std::fabs(want)};
  }
  const int col = j / 16 * 32 + j % 16;
  const double gate = p.sums[at(col)], up = up_term(c.epilogue, p.sums[at(col + 16)]);
  const double want = activated(c.epilogue, gate) * up;
  const double gate_error = 2e-6 * p.magnitudes[at(col)] + sum_error * std::fabs(p.raw[at(col)]);
  const double up_error =
      2e-6 * p.magnitudes[at(col + 16)] + sum_error * std::fabs(p.raw[at(col + 16)]);
  return {want, 1.1 * std::fabs(up) * gate_error + std::fabs(gate) * up_error +
                    gate_error * up_error + (y_eps + 1e-6) * std::fabs(want) + 1e-7};
}

inline void check_values(const Problem& p, const Output& y, const std::string& path,
                         double sum_error) {
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
             path + ", " + p.c.text() + ": column " + std::to_string(j) + " after the last");
    }
  }
}

// ---- cases

// Sanitizers are slow: every third case.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kEvery = 3;
#else
constexpr int kEvery = 1;
#endif

inline std::vector<Case> cases() {
  const int shapes[][2] = {{1, 1}, {40, 33}, {97, 129}, {160, 290}, {67, 1090}};
  const Epilogue epilogues[] = {Epilogue::store, Epilogue::silu_mul, Epilogue::add,
                                Epilogue::gelu_mul, Epilogue::swiglu_mul};
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
      c.epilogue = epilogues[turn / 2 % 5];
      c.y_16bit = c.epilogue != Epilogue::add && turn / 3 % 2;
      c.bias = turn / 5 % 2;
      c.addend = turn / 7 % 2;
      if (c.gated()) {
        c.n = static_cast<int>(round_up(c.n, 32));
        c.cut = turn % 4 * 5;
      }
      if (turn++ % kEvery == 0) all.push_back(c);
    }
  }
  return all;
}

}  // namespace turbomind
