// VecF: the float vector of the instruction set a *_cpu.cc file is compiled for. 16 lanes with
// AVX-512, 8 otherwise; the lane count divides 16, the width of the packed layouts.
// Every function is elementwise and rounds alike for whole and partial vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "cpu/isa_build.h"

#define TM_INLINE __attribute__((always_inline)) inline

namespace turbomind::TM_ISA_NS {

#if TM_HAS_AVX512

struct VecF {
  __m512 v;
};
constexpr int kLanes = 16;

TM_INLINE __mmask16 first_lanes(int n) {
  return static_cast<__mmask16>((1u << n) - 1);
}
TM_INLINE VecF zero() {
  return {_mm512_setzero_ps()};
}
TM_INLINE VecF broadcast(float f) {
  return {_mm512_set1_ps(f)};
}
TM_INLINE VecF load(const float* p) {
  return {_mm512_loadu_ps(p)};
}
TM_INLINE void store(float* p, VecF a) {
  _mm512_storeu_ps(p, a.v);
}
// Partial vectors: the first n lanes, 0 <= n <= kLanes. Other lanes read as zero and are not
// stored.
TM_INLINE VecF load_n(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
TM_INLINE void store_n(float* p, VecF a, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}
TM_INLINE VecF operator+(VecF a, VecF b) {
  return {_mm512_add_ps(a.v, b.v)};
}
TM_INLINE VecF operator-(VecF a, VecF b) {
  return {_mm512_sub_ps(a.v, b.v)};
}
TM_INLINE VecF operator*(VecF a, VecF b) {
  return {_mm512_mul_ps(a.v, b.v)};
}
TM_INLINE VecF operator/(VecF a, VecF b) {
  return {_mm512_div_ps(a.v, b.v)};
}
TM_INLINE VecF fma(VecF a, VecF b, VecF c) {
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
}
// The result is b if either operand is NaN.
TM_INLINE VecF max(VecF a, VecF b) {
  return {_mm512_max_ps(a.v, b.v)};
}
TM_INLINE VecF min(VecF a, VecF b) {
  return {_mm512_min_ps(a.v, b.v)};
}
TM_INLINE VecF abs(VecF a) {
  return {_mm512_abs_ps(a.v)};
}
// mag with the sign of s.
TM_INLINE VecF copysign(VecF mag, VecF s) {
  const __m512i bit = _mm512_set1_epi32(INT32_MIN);
  return {_mm512_castsi512_ps(
      _mm512_ternarylogic_epi32(bit, _mm512_castps_si512(s.v), _mm512_castps_si512(mag.v), 0xca))};
}
// a < b ? x : y
TM_INLINE VecF select_lt(VecF a, VecF b, VecF x, VecF y) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
TM_INLINE VecF round_even(VecF a) {
  return {_mm512_roundscale_ps(a.v, 0x08)};
}
// a * 2^n for integral n.
TM_INLINE VecF scale2(VecF a, VecF n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}

TM_INLINE float reduce_add(VecF a) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
TM_INLINE float reduce_max(VecF a) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

TM_INLINE VecF widen_bf16(__m256i h) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
TM_INLINE VecF load_bf16(const uint16_t* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
TM_INLINE VecF load_bf16_n(const uint16_t* p, int n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
TM_INLINE VecF load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
TM_INLINE VecF load_f16_n(const uint16_t* p, int n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
// 2 * kLanes bf16: elements 0, 2, 4... and 1, 3, 5... as floats.
TM_INLINE void load_bf16_pairs(const uint16_t* p, VecF& even, VecF& odd) {
  const __m512i u = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
  odd.v =
      _mm512_castsi512_ps(_mm512_and_si512(u, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// The same for float16.
TM_INLINE void load_f16_pairs(const uint16_t* p, VecF& even, VecF& odd) {
  const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
                                         30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i u = _mm512_permutexvar_epi16(order, _mm512_loadu_si512(p));
  even.v = _mm512_cvtph_ps(_mm512_castsi512_si256(u));
  odd.v = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(u, 1));
}
// Round to nearest even; overflow gives infinity, NaN stays NaN.
TM_INLINE void store_f16(uint16_t* p, VecF a) {
  const __m256i h = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), h);
}
// Round to nearest even; NaN stays NaN. With AVX512-BF16, subnormal inputs become zero.
TM_INLINE __m256i narrow_bf16(VecF a) {
#if TM_HAS_BF16_DOT
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  const __m512i u = _mm512_castps_si512(a.v), top = _mm512_srli_epi32(u, 16);
  const __m512i lsb = _mm512_and_si512(top, _mm512_set1_epi32(1));
  const __m512i r =
      _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(r, nan, top, _mm512_set1_epi32(0x40)));
#endif
}
TM_INLINE void store_bf16(uint16_t* p, VecF a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a));
}
TM_INLINE void store_bf16_n(uint16_t* p, VecF a, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a));
}

#elif TM_HAS_AVX2

struct VecF {
  __m256 v;
};
constexpr int kLanes = 8;

TM_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TM_INLINE VecF zero() {
  return {_mm256_setzero_ps()};
}
TM_INLINE VecF broadcast(float f) {
  return {_mm256_set1_ps(f)};
}
TM_INLINE VecF load(const float* p) {
  return {_mm256_loadu_ps(p)};
}
TM_INLINE void store(float* p, VecF a) {
  _mm256_storeu_ps(p, a.v);
}
TM_INLINE VecF load_n(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n))};
}
TM_INLINE void store_n(float* p, VecF a, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), a.v);
}
TM_INLINE VecF operator+(VecF a, VecF b) {
  return {_mm256_add_ps(a.v, b.v)};
}
TM_INLINE VecF operator-(VecF a, VecF b) {
  return {_mm256_sub_ps(a.v, b.v)};
}
TM_INLINE VecF operator*(VecF a, VecF b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
TM_INLINE VecF operator/(VecF a, VecF b) {
  return {_mm256_div_ps(a.v, b.v)};
}
TM_INLINE VecF fma(VecF a, VecF b, VecF c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
TM_INLINE VecF max(VecF a, VecF b) {
  return {_mm256_max_ps(a.v, b.v)};
}
TM_INLINE VecF min(VecF a, VecF b) {
  return {_mm256_min_ps(a.v, b.v)};
}
TM_INLINE VecF abs(VecF a) {
  return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)};
}
TM_INLINE VecF copysign(VecF mag, VecF s) {
  const __m256 bit = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(bit, mag.v), _mm256_and_ps(bit, s.v))};
}
TM_INLINE VecF select_lt(VecF a, VecF b, VecF x, VecF y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
TM_INLINE VecF round_even(VecF a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// In two halves, so that the factor neither overflows nor underflows for |n| up to 252.
TM_INLINE VecF scale2(VecF a, VecF n) {
  const __m256i i = _mm256_cvtps_epi32(n.v), half = _mm256_srai_epi32(i, 1);
  const __m256i bias = _mm256_set1_epi32(127), rest = _mm256_sub_epi32(i, half);
  const __m256i f = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
  const __m256i g = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
  return {_mm256_mul_ps(_mm256_mul_ps(a.v, _mm256_castsi256_ps(f)), _mm256_castsi256_ps(g))};
}

TM_INLINE float reduce_add(VecF a) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
TM_INLINE float reduce_max(VecF a) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

TM_INLINE VecF load_bf16(const uint16_t* p) {
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
TM_INLINE VecF load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
TM_INLINE void load_bf16_pairs(const uint16_t* p, VecF& even, VecF& odd) {
  const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even.v = _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
  odd.v =
      _mm256_castsi256_ps(_mm256_and_si256(u, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
TM_INLINE void load_f16_pairs(const uint16_t* p, VecF& even, VecF& odd) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1,
                                         4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  const __m256i u = _mm256_permute4x64_epi64(
      _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), order), 0xD8);
  even.v = _mm256_cvtph_ps(_mm256_castsi256_si128(u));
  odd.v = _mm256_cvtph_ps(_mm256_extracti128_si256(u, 1));
}
TM_INLINE void store_f16(uint16_t* p, VecF a) {
  const __m128i h = _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), h);
}
TM_INLINE void store_bf16(uint16_t* p, VecF a) {
  const __m256i u = _mm256_castps_si256(a.v), top = _mm256_srli_epi32(u, 16);
  const __m256i lsb = _mm256_and_si256(top, _mm256_set1_epi32(1));
  const __m256i r =
      _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  const __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
  const __m256i h = _mm256_blendv_epi8(r, quiet, nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(h, h), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

#else  // portable: two GNU vectors of four lanes, which map to SSE2 or NEON registers

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));
typedef uint32_t Uint4 __attribute__((vector_size(16)));

struct VecF {
  Float4 lo, hi;
};
constexpr int kLanes = 8;

TM_INLINE VecF zero() {
  return {Float4{}, Float4{}};
}
TM_INLINE VecF broadcast(float f) {
  return {Float4{f, f, f, f}, Float4{f, f, f, f}};
}
TM_INLINE VecF load(const float* p) {
  VecF a;
  std::memcpy(&a.lo, p, 16);
  std::memcpy(&a.hi, p + 4, 16);
  return a;
}
TM_INLINE void store(float* p, VecF a) {
  std::memcpy(p, &a.lo, 16);
  std::memcpy(p + 4, &a.hi, 16);
}
TM_INLINE VecF load_n(const float* p, int n) {
  float t[kLanes] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load(t);
}
TM_INLINE void store_n(float* p, VecF a, int n) {
  float t[kLanes];
  store(t, a);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
TM_INLINE VecF operator+(VecF a, VecF b) {
  return {a.lo + b.lo, a.hi + b.hi};
}
TM_INLINE VecF operator-(VecF a, VecF b) {
  return {a.lo - b.lo, a.hi - b.hi};
}
TM_INLINE VecF operator*(VecF a, VecF b) {
  return {a.lo * b.lo, a.hi * b.hi};
}
TM_INLINE VecF operator/(VecF a, VecF b) {
  return {a.lo / b.lo, a.hi / b.hi};
}
// Rounds twice: without the instruction, a fused product is a library call.
TM_INLINE VecF fma(VecF a, VecF b, VecF c) {
  return a * b + c;
}
TM_INLINE VecF max(VecF a, VecF b) {
  return {a.lo > b.lo ? a.lo : b.lo, a.hi > b.hi ? a.hi : b.hi};
}
TM_INLINE VecF min(VecF a, VecF b) {
  return {a.lo < b.lo ? a.lo : b.lo, a.hi < b.hi ? a.hi : b.hi};
}
TM_INLINE Float4 with_sign(Float4 mag, Float4 s) {
  const Uint4 bit = Uint4{} + 0x80000000u;
  return (Float4)(((Uint4)mag & ~bit) | ((Uint4)s & bit));
}
TM_INLINE VecF abs(VecF a) {
  return {with_sign(a.lo, Float4{}), with_sign(a.hi, Float4{})};
}
TM_INLINE VecF copysign(VecF mag, VecF s) {
  return {with_sign(mag.lo, s.lo), with_sign(mag.hi, s.hi)};
}
TM_INLINE VecF select_lt(VecF a, VecF b, VecF x, VecF y) {
  return {a.lo < b.lo ? x.lo : y.lo, a.hi < b.hi ? x.hi : y.hi};
}
// For |a| < 2^22: the sum with 1.5 * 2^23 has no bits for a fraction.
TM_INLINE VecF round_even(VecF a) {
  const VecF magic = broadcast(12582912.0f);
  return (a + magic) - magic;
}
TM_INLINE Float4 scale2_half(Float4 a, Float4 n) {
  const Int4 i = (Int4)(n + 12582912.0f) - 0x4b400000, half = i >> 1;
  return a * (Float4)((half + 127) << 23) * (Float4)((i - half + 127) << 23);
}
TM_INLINE VecF scale2(VecF a, VecF n) {
  return {scale2_half(a.lo, n.lo), scale2_half(a.hi, n.hi)};
}

TM_INLINE float reduce_add(VecF a) {
  const Float4 q = a.lo + a.hi;
  return (q[0] + q[2]) + (q[1] + q[3]);
}
TM_INLINE float reduce_max(VecF a) {
  const Float4 q = a.lo > a.hi ? a.lo : a.hi;
  const float x = q[0] > q[2] ? q[0] : q[2], y = q[1] > q[3] ? q[1] : q[3];
  return x > y ? x : y;
}

TM_INLINE VecF load_bf16(const uint16_t* p) {
  float t[kLanes];
  for (int i = 0; i < kLanes; ++i) t[i] = bf16_to_f32(p[i]);
  return load(t);
}
// Converts the float16 in the low half of each word: f16_to_f32 without its branches.
TM_INLINE Float4 widen_f16(Uint4 h) {
  const Uint4 magnitude = (h & 0x7fff) << 13;
  const Float4 f = (Float4)magnitude * 0x1p112f;  // moves the exponent; subnormals become normal
  const Uint4 special = (Uint4)((Int4)magnitude >= 0x0f800000) & 0x7f800000;  // infinity, NaN
  return (Float4)((Uint4)f | special | (h & 0x8000) << 16);
}
TM_INLINE VecF load_f16(const uint16_t* p) {
  const Uint4 lo = {p[0], p[1], p[2], p[3]}, hi = {p[4], p[5], p[6], p[7]};
  return {widen_f16(lo), widen_f16(hi)};
}
TM_INLINE void load_bf16_pairs(const uint16_t* p, VecF& even, VecF& odd) {
  Uint4 lo, hi;
  std::memcpy(&lo, p, 16);
  std::memcpy(&hi, p + 8, 16);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  even = {(Float4)(lo << 16), (Float4)(hi << 16)};
  odd = {(Float4)(lo & 0xffff0000u), (Float4)(hi & 0xffff0000u)};
#else
  odd = {(Float4)(lo << 16), (Float4)(hi << 16)};
  even = {(Float4)(lo & 0xffff0000u), (Float4)(hi & 0xffff0000u)};
#endif
}
TM_INLINE void load_f16_pairs(const uint16_t* p, VecF& even, VecF& odd) {
  Uint4 lo, hi;
  std::memcpy(&lo, p, 16);
  std::memcpy(&hi, p + 8, 16);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  even = {widen_f16(lo), widen_f16(hi)};  // it ignores the upper half of a word
  odd = {widen_f16(lo >> 16), widen_f16(hi >> 16)};
#else
  odd = {widen_f16(lo), widen_f16(hi)};
  even = {widen_f16(lo >> 16), widen_f16(hi >> 16)};
#endif
}
TM_INLINE void store_f16(uint16_t* p, VecF a) {
  float t[kLanes];
  store(t, a);
  for (int i = 0; i < kLanes; ++i) p[i] = f32_to_f16(t[i]);
}
TM_INLINE void store_bf16(uint16_t* p, VecF a) {
  float t[kLanes];
  store(t, a);
  for (int i = 0; i < kLanes; ++i) p[i] = f32_to_bf16(t[i]);
}

#endif

#if !TM_HAS_AVX512
TM_INLINE VecF load_bf16_n(const uint16_t* p, int n) {
  uint16_t t[kLanes] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load_bf16(t);
}
TM_INLINE VecF load_f16_n(const uint16_t* p, int n) {
  uint16_t t[kLanes] = {};
  for (int i = 0; i < n; ++i) t[i] = p[i];
  return load_f16(t);
}
TM_INLINE void store_bf16_n(uint16_t* p, VecF a, int n) {
  uint16_t t[kLanes];
  store_bf16(t, a);
  for (int i = 0; i < n; ++i) p[i] = t[i];
}
#endif

#if TM_HAS_BF16_DOT
// acc + a[0] * b[2i] + a[1] * b[2i+1] per lane i; `a` is one pair, b holds kLanes pairs.
TM_INLINE VecF dot_bf16(VecF acc, const uint16_t* a, __m512i b) {
  int pair;
  std::memcpy(&pair, a, 4);
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b)};
}
#endif

// e^x within about 1 ulp; 0 below -87.3 (no subnormal results), infinity above 88.7, NaN stays NaN.
TM_INLINE VecF exp(VecF x) {
  const VecF low = broadcast(-87.33654f);
  const VecF c = max(low, min(broadcast(89.0f), x));
  const VecF n = round_even(c * broadcast(1.44269504f));
  VecF r = fma(n, broadcast(-0.693359375f), c);  // ln 2 in two parts; the first product is exact
  r = fma(n, broadcast(2.12194440e-4f), r);
  VecF p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r) + broadcast(1.0f);
  return select_lt(x, low, zero(), scale2(p, n));
}

// 2^x within 2 ulp for x <= 0 (softmax weights): 0 for -infinity, NaN stays NaN.
TM_INLINE VecF exp2_nonpositive(VecF x) {
#if TM_HAS_AVX512
  // scalef takes floor(x), so the polynomial is fitted to the fraction in [0, 1].
  const VecF r = {_mm512_reduce_ps(x.v, 0x09)};
  VecF p = broadcast(0.0018671266734600067f);
  p = fma(p, r, broadcast(0.009017037227749825f));
  p = fma(p, r, broadcast(0.05579990893602371f));
  p = fma(p, r, broadcast(0.24016445875167847f));
  p = fma(p, r, broadcast(0.6931512951850891f));
  p = fma(p, r, broadcast(1.0f));
  return scale2(p, x);
#else
  const VecF low = broadcast(-126.0f);
  const VecF c = max(low, x), n = round_even(c), r = c - n;
  VecF p = broadcast(0.0013264709850773215f);
  p = fma(p, r, broadcast(0.009671512059867382f));
  p = fma(p, r, broadcast(0.05550733953714371f));
  p = fma(p, r, broadcast(0.24022242426872253f));
  p = fma(p, r, broadcast(0.6931470036506653f));
  p = fma(p, r, broadcast(1.0f));
  return select_lt(x, low, zero(), scale2(p, n));
#endif
}

#if TM_HAS_BF16_DOT
// The same within 1e-4, a twentieth of what rounding the result to bfloat16 costs.
TM_INLINE VecF exp2_coarse(VecF x) {
  const VecF r = {_mm512_reduce_ps(x.v, 0x09)};
  VecF p = broadcast(0.07706657f);
  p = fma(p, r, broadcast(0.22764551f));
  p = fma(p, r, broadcast(0.69511667f));
  p = fma(p, r, broadcast(1.0f));
  return scale2(p, x);
}
#endif

TM_INLINE VecF tanh(VecF x) {
  const VecF one = broadcast(1.0f), a = abs(x), z = x * x;
  const VecF e = exp(a * broadcast(-2.0f));
  const VecF far = copysign((one - e) / (one + e), x);
  VecF p = broadcast(-5.70498872745e-3f);  // near zero the quotient above would cancel
  p = fma(p, z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  return select_lt(a, broadcast(0.625f), fma(p * z, x, x), far);
}

TM_INLINE VecF silu(VecF x) {
  return x / (broadcast(1.0f) + exp(zero() - x));
}

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + exp(-2u)).
TM_INLINE VecF gelu_tanh(VecF x) {
  const VecF cubic = fma(x * x, broadcast(0.044715f * 1.5957691216f), broadcast(1.5957691216f));
  return x / (broadcast(1.0f) + exp(zero() - x * cubic));
}

}  // namespace turbomind::TM_ISA_NS
