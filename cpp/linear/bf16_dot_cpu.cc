// bfloat16 weights times bfloat16 activations with AVX512-BF16: pairs of k per instruction.
#include "linear/linear_loop.h"

#if TM_HAS_BF16_DOT && !TM_HAS_TILES

namespace turbomind::TM_ISA_NS {

namespace {

struct Bf16DotKernel {
  // 24 sums, 4 weights and a broadcast of the 32 vector registers: 10 loads for 24 products.
  static constexpr int kRows = 6;
  static constexpr int kRowAlign = 1;
  static constexpr int kPanels = 4;
  static constexpr int kKBlockBytes = 1024;
  static constexpr int kChunk = 64;  // four panels: 256 KiB, a quarter of the second-level cache

  static void begin(const LinearPiece&) {}

  template <int R, int C>
  static void product(const uint16_t* x, int64_t x_stride, const uint8_t* w, int64_t panel_bytes,
                      int64_t pairs, bool from_zero, float* acc, int64_t acc_stride,
                      const Prefetch& prefetch) {
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
  static void block(const LinearJob& job, int64_t row, int rows, const uint8_t* w, int panels,
                    int64_t k_begin, int64_t k_end, float* acc, int64_t acc_stride,
                    Prefetch prefetch) {
    if constexpr (R > 1) {
      if (rows < R) {
        return block<R - 1>(job, row, rows, w, panels, k_begin, k_end, acc, acc_stride, prefetch);
      }
    }
    const uint16_t* x =
        reinterpret_cast<const uint16_t*>(job.x + row * job.x_stride) + k_begin * 32;
    const int64_t x_stride = job.x_stride / 2, pairs = (k_end - k_begin) * 16;
    const bool from_zero = k_begin == 0;
    if (panels == kPanels) {
      return product<R, kPanels>(x, x_stride, w, job.panel_bytes, pairs, from_zero, acc, acc_stride,
                                 prefetch);
    }
    for (int c = 0; c < panels; ++c, prefetch.panels = 0) {
      product<R, 1>(x, x_stride, w + c * job.panel_bytes, job.panel_bytes, pairs, from_zero,
                    acc + c * 16, acc_stride, prefetch);
    }
  }
};

}  // namespace

const LinearKernel bf16_dot_kernel = {Bf16DotKernel::kRows,
                                      Bf16DotKernel::kPanels,
                                      Bf16DotKernel::kChunk,
                                      Bf16DotKernel::kPanels,
                                      true,
                                      false,
                                      run_piece<Bf16DotKernel>};

}  // namespace turbomind::TM_ISA_NS

#endif
