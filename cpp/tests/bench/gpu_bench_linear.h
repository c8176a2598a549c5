// gpu_bench: the matrix products of real models.
#pragma once

#include "linear/linear_cuda.h"
#include "linear/linear_workspace.h"
#include "tests/bench/gpu_bench.h"

namespace turbomind {

// Published sizes.
struct ModelShape {
  const char* name;
  int hidden, intermediate, heads, kv_heads, head_dim, vocab;
};

inline std::vector<ModelShape> model_shapes(bool quick) {
  if (quick) return {{"tiny", 64, 96, 4, 2, 32, 160}};
  return {{"llama-3-8b", 4096, 14336, 32, 8, 128, 128256},
          {"qwen2.5-7b", 3584, 18944, 28, 4, 128, 152064},
          {"llama-3.2-1b", 2048, 8192, 32, 8, 64, 128256}};
}

struct ProductShape {
  std::string name;
  int64_t n, k;
  Epilogue epilogue;
  bool y_16bit;
};

inline std::vector<ProductShape> products(const ModelShape& m) {
  const int64_t q = int64_t{m.heads} * m.head_dim, kv = int64_t{m.kv_heads} * m.head_dim;
  const std::string model = m.name;
  return {{model + " qkv", q + 2 * kv, m.hidden, Epilogue::store, false},
          {model + " o", m.hidden, q, Epilogue::add, false},
          {model + " gate_up", int64_t{2} * m.intermediate, m.hidden, Epilogue::silu_mul, true},
          {model + " down", m.hidden, m.intermediate, Epilogue::add, false},
          {model + " head", m.vocab, m.hidden, Epilogue::store, false}};
}

inline const char* path_name(LinearPath path) {
  return path == LinearPath::skinny ? "skinny" : path == LinearPath::gemm ? "gemm" : "cublaslt";
}

// One set of operands of a product of m rows.
inline DeviceProduct take_product(Arena& arena, const ProductShape& s, int64_t m) {
  const bool gated = is_gated(s.epilogue);
  DeviceProduct p;
  p.k_padded = static_cast<int32_t>(round_up(s.k, 32));
  p.m = static_cast<int32_t>(m);
  p.n = static_cast<int32_t>(s.n);
  p.y_cols = static_cast<int32_t>(gated ? s.n / 2 : s.n);
  p.y_stride = p.y_zero_end = static_cast<int32_t>(round_up(p.y_cols, 32));
  p.x_stride = p.k_padded;
  p.y_16bit = s.y_16bit;
  p.epilogue = s.epilogue;
  p.w = arena.take<uint16_t>(s.n * p.k_padded);
  p.x = arena.take<uint16_t>(m * p.k_padded);
  p.y = arena.take<uint8_t>(m * p.y_stride * (s.y_16bit ? 2 : 4));
  return p;
}

// Calls it like the decoder; `deterministic`: without cuBLASLt.
inline void bench_product(Bench& b, const ProductShape& s, int64_t m, bool deterministic) {
  const bool gated = is_gated(s.epilogue);
  DeviceLinear l = device_linear(b.gpu, gated ? m : 0, s.n);
  l.deterministic = l.deterministic || deterministic;
  const LinearPath path =
      linear_path(m, l.deterministic, l.cublaslt != nullptr, skinny_rows(l.shared_per_block));
  Figure figure{"linear", s.name, {{"m", m}, {"n", s.n}, {"k", s.k}}, path_name(path)};
  try {
    b.arena.reset();
    std::vector<DeviceProduct> sets{take_product(b.arena, s, m)};
    const Work work{static_cast<double>(linear_bytes(sets[0])), 2.0 * m * s.n * s.k};
    while (static_cast<int>(sets.size()) < b.sets(work.bytes))
      sets.push_back(take_product(b.arena, s, m));
    figure.print(b.measure(static_cast<int>(sets.size()), work,
                           [&](int set) { linear(l, b.gpu.handle(), sets[set]); }),
                 work);
  } catch (const Error& e) {
    figure.print_error(e.what());
  }
}

inline void bench_linear(Bench& b) {
  const std::vector<int> all = b.quick ? std::vector<int>{1, 17} : std::vector{1, 8, 16, 64, 2048};
  for (const ModelShape& model : model_shapes(b.quick)) {
    for (const ProductShape& product : products(model)) {
      for (const int m : all) {
        if (m > 64 && product.n == model.vocab) continue;  // rows that are not sampled
        bench_product(b, product, m, false);
        if (m > kSkinnyRows && device_linear(b.gpu, 0, 0).cublaslt != nullptr)
          bench_product(b, product, m, true);
      }
    }
  }
}

}  // namespace turbomind
