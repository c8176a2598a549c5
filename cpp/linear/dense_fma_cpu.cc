// Products with float32 activations and fused multiply-adds, for weights of every dense type.
#include "linear/linear_loop.h"

namespace turbomind::TM_ISA_NS {

namespace {

// Weights of kLanes outputs of a panel: load(line, v, odd) gives vector v of the even or odd k of
// the pair of k that starts at `line`.
struct Bfloat16Weights {
  static constexpr int kPairBytes = 64;
  static TM_INLINE VecF load(const uint8_t* line, int v, int odd) {
    VecF pair[2];
    load_bf16_pairs(reinterpret_cast<const uint16_t*>(line) + v * kLanes * 2, pair[0], pair[1]);
    return pair[odd];
  }
};
struct Float16Weights {
  static constexpr int kPairBytes = 64;
  static TM_INLINE VecF load(const uint8_t* line, int v, int odd) {
    return load_f16(reinterpret_cast<const uint16_t*>(line) + odd * 16 + v * kLanes);
  }
};
struct Float32Weights {
  static constexpr int kPairBytes = 128;
  static TM_INLINE VecF load(const uint8_t* line, int v, int odd) {
    return TM_ISA_NS::load(reinterpret_cast<const float*>(line) + odd * 16 + v * kLanes);
  }
};

// Keeps sums in registers at this point. With the 16 of AVX2, gcc 12 hoists broadcasts above the
// products and spills five of twelve sums in each pair of k, which costs a third of the rate.
TM_INLINE void stay_in_registers(VecF& a, VecF& b) {
#if TM_HAS_AVX2
  asm volatile("" : "+x"(a.v), "+x"(b.v));
#else
  (void)a, (void)b;
#endif
}

template <class Weights>
struct FmaKernel {
  // Sums, one row of weights and one broadcast fill the 32 (AVX-512) or 16 vector registers.
  static constexpr int kRows = TM_HAS_AVX2 ? 6 : 2;
  static constexpr int kRowAlign = 1;
  static constexpr int kPanels = TM_HAS_AVX512 ? 4 : 2;
  // Panels at once; with few rows two, so that enough sums are under way.
  static constexpr int block_panels(int rows) {
    return TM_HAS_AVX512 ? 4 : rows <= (TM_HAS_AVX2 ? 2 : 1) ? 2 : 1;
  }
  static constexpr int kKBlockBytes = Weights::kPairBytes * 16;
  static constexpr bool kPipelined = false;
  static constexpr bool kUnpacks = false;
  // Four panels of a chunk fill at most a quarter of a 1 MiB second-level cache.
  static constexpr int kChunk = (256 << 10) / (4 * kKBlockBytes);

  static void begin(const LinearPiece&) {}

  template <int R, int C>
  static void product(const float* x, int64_t x_stride, const uint8_t* w, int64_t panel_bytes,
                      int64_t pairs, bool from_zero, float* acc, int64_t acc_stride,
                      const Prefetch& prefetch) {
    constexpr int V = C * kPanelVecs;
    VecF sum[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sum[r][v] = from_zero ? zero() : load(acc + r * acc_stride + v * kLanes);
      }
    }
    for (int64_t i = 0; i < pairs; ++i) {
      const uint8_t* line = w + i * Weights::kPairBytes;
      for (int b = 0; b < Weights::kPairBytes; b += 64) {
        fetch(prefetch, panel_bytes, i * Weights::kPairBytes + b);
      }
#pragma GCC unroll 8
      for (int odd = 0; odd < 2; ++odd) {
        VecF weight[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          weight[v] = Weights::load(line + v / kPanelVecs * panel_bytes, v % kPanelVecs, odd);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const VecF a = broadcast(x[r * x_stride + 2 * i + odd]);
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) sum[r][v] = fma(a, weight[v], sum[r][v]);
          if constexpr (kLanes == 8 && V == 2) stay_in_registers(sum[r][0], sum[r][1]);
        }
        asm volatile("" : "+r"(line));  // loading both k at once would spill sums
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) store(acc + r * acc_stride + v * kLanes, sum[r][v]);
    }
  }

  template <int R>
  static void rows_block(const LinearJob& job, const float* x, const uint8_t* w, int panels,
                         int64_t pairs, bool from_zero, float* acc, int64_t acc_stride,
                         Prefetch prefetch) {
    const int64_t x_stride = job.x_stride / 4;
    constexpr int kAtOnce = block_panels(R);
    int c = 0;
    for (; c + kAtOnce <= panels; c += kAtOnce, prefetch.panels = 0) {
      product<R, kAtOnce>(x, x_stride, w + c * job.panel_bytes, job.panel_bytes, pairs, from_zero,
                          acc + c * 16, acc_stride, prefetch);
    }
    for (; c < panels; ++c, prefetch.panels = 0) {
      product<R, 1>(x, x_stride, w + c * job.panel_bytes, job.panel_bytes, pairs, from_zero,
                    acc + c * 16, acc_stride, prefetch);
    }
  }

  template <int R = kRows>
  static void block(const LinearJob& job, const Visit& v, const uint8_t* w, float* acc,
                    int64_t acc_stride, const Prefetch& prefetch, Unfinished& unfinished) {
    if constexpr (R > 1) {
      if (v.rows < R) return block<R - 1>(job, v, w, acc, acc_stride, prefetch, unfinished);
    }
    const float* x = reinterpret_cast<const float*>(job.x + v.row * job.x_stride) + v.k_begin * 32;
    rows_block<R>(job, x, w, v.panels, (v.k_end - v.k_begin) * 16, v.k_begin == 0, acc, acc_stride,
                  prefetch);
  }
};

template <class K>
constexpr LinearKernel kernel_of() {
  return {K::kRows, K::kPanels, K::kChunk, K::kPanels, XType::f32, false, false, run_piece<K>};
}

constexpr LinearKernel kBf16 = kernel_of<FmaKernel<Bfloat16Weights>>();
constexpr LinearKernel kF16 = kernel_of<FmaKernel<Float16Weights>>();
constexpr LinearKernel kF32 = kernel_of<FmaKernel<Float32Weights>>();

}  // namespace

const DenseKernels& dense_kernel_table() {
#if TM_HAS_TILES
  static constexpr DenseKernels table = {&bf16_tile_small_kernel, &bf16_tile_small_kernel,
                                         &bf16_tile_kernel, &kF16, &kF32};
#elif TM_HAS_BF16_DOT
  static constexpr DenseKernels table = {&bf16_dot_eight_kernel, &bf16_dot_kernel, &bf16_dot_kernel,
                                         &kF16, &kF32};
#else
  static constexpr DenseKernels table = {&kBf16, &kBf16, &kBf16, &kF16, &kF32};
#endif
  return table;
}

}  // namespace turbomind::TM_ISA_NS
