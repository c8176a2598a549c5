#include "cpu/vec.h"
#include "sampling/row_kernels.h"

namespace turbomind::TM_ISA_NS {

using row::kRowBlock;

// One register of floats. GNU vectors rather than VecF: the bits of a float are integers too.
constexpr int kWidth = TM_HAS_AVX512 ? 16 : TM_HAS_AVX2 ? 8 : 4;
typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));

// Returns a block of `len` logits, filled up with -infinity in `tail` where it is the last one.
static TM_INLINE const float* whole_block(const float* x, int64_t len, float* tail) {
  if (len >= kRowBlock) return x;
  for (int i = 0; i < kRowBlock; ++i) tail[i] = i < len ? x[i] : -__builtin_inff();
  return tail;
}

static row::Scan scan(const float* x, int64_t n, float* block_max) {
  float tail[kRowBlock];
  const VecF lowest = broadcast(-__builtin_inff());
  VecF top = lowest;
  Ints nan{};
  for (int64_t begin = 0; begin < n; begin += kRowBlock) {
    const float* p = whole_block(x + begin, n - begin, tail);
    VecF most = lowest;  // never NaN: of a NaN and another operand, max() returns the second
    for (int i = 0; i < kRowBlock; i += kLanes) most = max(load(p + i), most);
    for (int i = 0; i < kRowBlock; i += kWidth) {
      Floats v;
      std::memcpy(&v, p + i, sizeof v);
      nan |= v != v;
    }
    if (block_max) block_max[begin / kRowBlock] = reduce_max(most);
    top = max(top, most);
  }
  int32_t any = 0;
  for (int i = 0; i < kWidth; ++i) any |= nan[i];
  return {reduce_max(top), any != 0};
}

// e^x for x <= 0 to 2 units in the last place; 0 below -87 (and for -infinity). Not the exp of
// cpu/vec.h: products and sums are rounded one by one, which gives every set the same bits.
static TM_INLINE Floats exp_nonpositive(Floats x) {
  constexpr int32_t kLimit = 0x42AE0000;  // 87.0f
  const Ints abs = (Ints)x & 0x7fffffff;
  const Ints inside = abs < kLimit;
  const Floats c = -(Floats)((abs & inside) | (kLimit & ~inside));
  // 1.5 * 2^23: leaves round(c / ln 2) in the low bits
  const Floats t = c * 1.44269504f + 12582912.0f;
  const Floats k = t - 12582912.0f;
  const Floats r = (c - k * 0.693359375f) + k * 2.12194440e-4f;  // ln 2 in two parts
  Floats p = r * 1.3888889e-3f + 8.3333333e-3f;  // Taylor to r^6: |r| <= ln(2) / 2 leaves 1e-7
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return (Floats)(((Ints)p + ((Ints)t << 23)) & inside);
}

static TM_INLINE void exp_block(const float* x, int64_t len, float max, float scale, float* w) {
  float tail[kRowBlock];
  x = whole_block(x, len, tail);
  for (int i = 0; i < kRowBlock; i += kWidth) {
    Floats v;
    std::memcpy(&v, x + i, sizeof v);
    v = exp_nonpositive((v - max) * scale);
    std::memcpy(w + i, &v, sizeof v);
  }
}

// Returns the sum of one whole block, in double: eight lanes, then pairs of them.
static TM_INLINE double block_sum(const float* w) {
  double lane[8] = {};
  for (int i = 0; i < kRowBlock; i += 8) {
    for (int j = 0; j < 8; ++j) lane[j] += w[i + j];
  }
  return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

static double weigh(const float* x, int64_t n, float max, float scale, float* weights,
                    double* sums) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kRowBlock) {
    exp_block(x + begin, n - begin, max, scale, weights + begin);
    total += sums[begin / kRowBlock] = block_sum(weights + begin);
  }
  return total;
}

static void sum_blocks(const float* weights, int64_t blocks, double* sums) {
  for (int64_t b = 0; b < blocks; ++b) sums[b] = block_sum(weights + b * kRowBlock);
}

static double exp_sum(const float* x, int64_t n, float max) {
  double sum = 0;
  float w[kRowBlock];
  for (int64_t begin = 0; begin < n; begin += kRowBlock) {
    exp_block(x + begin, n - begin, max, 1.0f, w);
    sum += block_sum(w);
  }
  return sum;
}

const row::RowKernels& row_kernels() {
  static constexpr row::RowKernels table{scan, weigh, sum_blocks, exp_sum};
  return table;
}

}  // namespace turbomind::TM_ISA_NS
