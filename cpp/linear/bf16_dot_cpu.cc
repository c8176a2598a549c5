// bfloat16 weights times bfloat16 activations with AVX512-BF16: pairs of k per instruction.
#include "linear/linear_loop.h"

#if TM_HAS_BF16_DOT && !TM_HAS_TILES

namespace turbomind::TM_ISA_NS {

namespace {

template <int kBlockRows, int kBlockPanels>
struct Bf16DotKernel {
  static constexpr int kRows = kBlockRows;
  static constexpr int kRowAlign = 1;
  static constexpr int kPanels = kBlockPanels;
  static constexpr bool kPipelined = false;
  static constexpr bool kUnpacks = false;

  static void begin(const LinearPiece&) {}

  // A function of its own has enough registers for its pointers. Inlined, gcc 12 keeps some of them
  // in vector registers, which costs 7 % of the rate of 512 rows.
  template <int R, int C>
  [[gnu::noinline]] static void product(const uint16_t* x, int64_t x_stride, const uint8_t* w,
                                        int64_t panel_bytes, int64_t pairs, bool from_zero,
                                        float* acc, int64_t acc_stride, const Prefetch& prefetch) {
    VecF sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        sum[r][c] = from_zero ? zero() : load(acc + r * acc_stride + c * 16);
      }
    }
    for (int64_t i = 0; i < pairs; ++i) {
      fetch(prefetch, panel_bytes, i * 64);
      __m512i weight[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) weight[c] = _mm512_load_si512(w + c * panel_bytes + i * 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          sum[r][c] = dot_bf16(sum[r][c], x + r * x_stride + 2 * i, weight[c]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) store(acc + r * acc_stride + c * 16, sum[r][c]);
    }
  }

  template <int R = kRows>
  static void block(const LinearJob& job, const Visit& v, const uint8_t* w, float* acc,
                    int64_t acc_stride, Prefetch prefetch, Unfinished& unfinished) {
    if constexpr (R > 1) {
      if (v.rows < R) return block<R - 1>(job, v, w, acc, acc_stride, prefetch, unfinished);
    }
    const uint16_t* x =
        reinterpret_cast<const uint16_t*>(job.x + v.row * job.x_stride) + v.k_begin * 32;
    const int64_t x_stride = job.x_stride / 2, pairs = (v.k_end - v.k_begin) * 16;
    const bool from_zero = v.k_begin == 0;
    if (v.panels == kPanels) {
      return product<R, kPanels>(x, x_stride, w, job.panel_bytes, pairs, from_zero, acc, acc_stride,
                                 prefetch);
    }
    for (int c = 0; c < v.panels; ++c, prefetch.panels = 0) {
      product<R, 1>(x, x_stride, w + c * job.panel_bytes, job.panel_bytes, pairs, from_zero,
                    acc + c * 16, acc_stride, prefetch);
    }
  }
};

// Chunks of 64 K blocks of four panels are 256 KiB, a quarter of the second-level cache.
template <class K>
constexpr LinearKernel kernel_of() {
  return {K::kRows, K::kPanels, 64, K::kPanels, XType::bf16, false, false, run_piece<K>};
}

}  // namespace

// 24 sums, 4 weights and a broadcast of the 32 vector registers: 10 loads for 24 products.
const LinearKernel bf16_dot_kernel = kernel_of<Bf16DotKernel<6, 4>>();
// As many rows at once, so that 7 or 8 of them use the weights once and not twice.
const LinearKernel bf16_dot_eight_kernel = kernel_of<Bf16DotKernel<8, 2>>();

}  // namespace turbomind::TM_ISA_NS

#endif
