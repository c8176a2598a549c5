// Loops over one row of logits, written so that the compiler turns them into vector code for the
// baseline, with sums of fixed shape. Blocks of kRowBlock logits let selections skip most of a row.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

namespace turbomind::row {

constexpr int kRowBlock = 64;
constexpr int kLanes = 16;
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

constexpr int64_t blocks(int64_t n) {
  return (n + kRowBlock - 1) / kRowBlock;
}

struct Scan {
  float max = kNegInf;
  bool nan = false;
};

// Returns the row's maximum and whether it has a NaN; writes each block's maximum to block_max
// [blocks] unless that is null.
inline Scan scan(const float* x, int64_t n, float* block_max) {
  Scan out;
  uint32_t nan[kLanes] = {};
  for (int64_t b = 0, begin = 0; begin < n; ++b, begin += kRowBlock) {
    const float* p = x + begin;
    float m[kLanes];
    std::fill(m, m + kLanes, kNegInf);
    if (n - begin >= kRowBlock) {
      for (int i = 0; i < kRowBlock; i += kLanes) {
        for (int j = 0; j < kLanes; ++j) {
          m[j] = p[i + j] > m[j] ? p[i + j] : m[j];
          nan[j] |= p[i + j] != p[i + j];
        }
      }
    } else {
      for (int64_t i = 0; i < n - begin; ++i) {
        m[0] = p[i] > m[0] ? p[i] : m[0];
        nan[0] |= p[i] != p[i];
      }
    }
    const float top = *std::max_element(m, m + kLanes);
    if (block_max) block_max[b] = top;
    out.max = top > out.max ? top : out.max;
  }
  for (uint32_t v : nan) out.nan |= v != 0;
  return out;
}

// Returns the lowest id whose logit is `max`, a value of the row.
inline int32_t find_max(const float* x, int64_t n, float max, const float* block_max) {
  int64_t b = 0;
  while (block_max[b] != max) ++b;
  const float* begin = x + b * kRowBlock;
  const float* end = x + std::min(n, (b + 1) * kRowBlock);
  return static_cast<int32_t>(std::find(begin, end, max) - x);
}

// Four lanes at a time: gcc does not vectorise the scalar form, whose two selects become a branch.
using F4 = float __attribute__((vector_size(16)));
using I4 = int32_t __attribute__((vector_size(16)));

// Returns exp(x) for x <= 0 to 2 units in the last place; 0 below -87 (and for -inf).
inline F4 exp_nonpositive(F4 x) {
  constexpr int32_t kLimit = 0x42AE0000;  // 87.0f
  const I4 abs = std::bit_cast<I4>(x) & 0x7fffffff;
  const I4 inside = abs < kLimit;
  const F4 c = -std::bit_cast<F4>((abs & inside) | (kLimit & ~inside));
  const F4 t = c * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: leaves round(c / ln 2) in the low bits
  const F4 k = t - 12582912.0f;
  const F4 r = (c - k * 0.693359375f) + k * 2.12194440e-4f;  // ln 2 in two parts
  F4 p = r * 1.3888889e-3f + 8.3333333e-3f;  // Taylor to r^6: |r| <= ln(2) / 2 leaves 1e-7
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return std::bit_cast<F4>((std::bit_cast<I4>(p) + (std::bit_cast<I4>(t) << 23)) & inside);
}

// Returns the sum of one whole block, in double, lanes first.
inline double block_sum(const float* w) {
  double lane[8] = {};
  for (int i = 0; i < kRowBlock; i += 8) {
    for (int j = 0; j < 8; ++j) lane[j] += w[i + j];
  }
  return ((lane[0] + lane[4]) + (lane[1] + lane[5])) + ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

// Writes w[i] = exp((x[i] - max) * scale) for one block of `len` logits, and zeros up to its end.
inline void exp_block(const float* x, int64_t len, float max, float scale, float* w) {
  float tail[kRowBlock];
  if (len < kRowBlock) {
    std::fill(std::copy(x, x + len, tail), tail + kRowBlock, kNegInf);
    x = tail;
  }
  for (int i = 0; i < kRowBlock; i += 4) {
    F4 v;
    std::memcpy(&v, x + i, sizeof(v));
    v = exp_nonpositive((v - max) * scale);
    std::memcpy(w + i, &v, sizeof(v));
  }
}

// Returns log(sum(exp(x))), given the row's finite maximum.
inline double log_sum_exp(const float* x, int64_t n, float max) {
  double sum = 0;
  float w[kRowBlock];
  for (int64_t begin = 0; begin < n; begin += kRowBlock) {
    exp_block(x + begin, n - begin, max, 1.0f, w);
    sum += block_sum(w);
  }
  return max + std::log(sum);
}

struct Candidate {
  float logit = 0;
  int32_t id = 0;
  double weight = 0;
};

// Orders tokens, everywhere in sampling: higher logit first, ties by lower id.
inline bool before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Writes the k first tokens of that order to `out`, themselves in no particular order. The k-th
// largest block maximum is a lower bound of the k-th largest logit, so few more than k tokens are
// read.
inline void select_top(const float* x, int64_t n, int64_t k, const float* block_max,
                       std::vector<float>& scratch, std::vector<Candidate>& out) {
  out.clear();
  const int64_t nb = blocks(n);
  float floor = kNegInf;
  if (k <= nb) {
    scratch.assign(block_max, block_max + nb);
    std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<>());
    floor = scratch[k - 1];
  }
  for (int64_t b = 0; b < nb; ++b) {
    if (block_max[b] < floor) continue;
    const int64_t end = std::min(n, (b + 1) * kRowBlock);
    for (int64_t i = b * kRowBlock; i < end; ++i) {
      if (x[i] >= floor) out.push_back({x[i], static_cast<int32_t>(i), 0});
    }
  }
  if (static_cast<int64_t>(out.size()) > k) {
    std::nth_element(out.begin(), out.begin() + k, out.end(), before);
    out.resize(k);
  }
}

}  // namespace turbomind::row
