// VecI: vectors of int32 with the lanes of VecF, whose bytes may be loaded as integer codes.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/vec.h"

namespace turbomind::TM_ISA_NS {

// load_line() reads a line of codes, which has four bytes of each lane. low_halves() and
// high_halves() return the codes of 4 bits in its bytes.
#if TM_HAS_AVX512
using VecI = __m512i;
TM_INLINE VecI broadcast_int(int32_t i) {
  return _mm512_set1_epi32(i);
}
TM_INLINE VecI load_line(const uint8_t* p) {
  return _mm512_loadu_si512(p);
}
TM_INLINE void store_line(uint8_t* p, VecI a) {
  _mm512_storeu_si512(p, a);
}
TM_INLINE VecI low_halves(VecI a) {
  return _mm512_and_si512(a, _mm512_set1_epi8(15));
}
TM_INLINE VecI high_halves(VecI a) {
  return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15));
}
TM_INLINE VecF to_float(VecI a) {
  return {_mm512_cvtepi32_ps(a)};
}
TM_INLINE VecF load_int8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
TM_INLINE VecF load_uint8(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
TM_INLINE void store_int8(int8_t* p, VecF a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
#elif TM_HAS_AVX2
using VecI = __m256i;
TM_INLINE VecI broadcast_int(int32_t i) {
  return _mm256_set1_epi32(i);
}
TM_INLINE VecI load_line(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
TM_INLINE void store_line(uint8_t* p, VecI a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a);
}
TM_INLINE VecI low_halves(VecI a) {
  return _mm256_and_si256(a, _mm256_set1_epi8(15));
}
TM_INLINE VecI high_halves(VecI a) {
  return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15));
}
TM_INLINE VecF to_float(VecI a) {
  return {_mm256_cvtepi32_ps(a)};
}
TM_INLINE VecF load_int8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
TM_INLINE VecF load_uint8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
TM_INLINE void store_int8(int8_t* p, VecF a) {
  const __m256i i = _mm256_cvtps_epi32(a.v);
  const __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(h, h));
}
#else
struct VecI {
  Int4 lo, hi;
};
TM_INLINE VecI broadcast_int(int32_t i) {
  return {Int4{i, i, i, i}, Int4{i, i, i, i}};
}
TM_INLINE VecI load_line(const uint8_t* p) {
  VecI a;
  std::memcpy(&a, p, sizeof a);
  return a;
}
TM_INLINE void store_line(uint8_t* p, VecI a) {
  std::memcpy(p, &a, sizeof a);
}
TM_INLINE VecI low_halves(VecI a) {
  return {a.lo & 0x0f0f0f0f, a.hi & 0x0f0f0f0f};
}
TM_INLINE VecI high_halves(VecI a) {
  return {a.lo >> 4 & 0x0f0f0f0f, a.hi >> 4 & 0x0f0f0f0f};
}
TM_INLINE VecF to_float(VecI a) {
  return {__builtin_convertvector(a.lo, Float4), __builtin_convertvector(a.hi, Float4)};
}
template <typename T>
TM_INLINE VecF load_bytes(const uint8_t* p) {
  float f[kLanes];
  for (int i = 0; i < kLanes; ++i) f[i] = static_cast<float>(static_cast<T>(p[i]));
  return load(f);
}
TM_INLINE VecF load_int8(const uint8_t* p) {
  return load_bytes<int8_t>(p);
}
TM_INLINE VecF load_uint8(const uint8_t* p) {
  return load_bytes<uint8_t>(p);
}
TM_INLINE void store_int8(int8_t* p, VecF a) {
  float f[kLanes];
  store(f, a);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(f[i]);
}
#endif

constexpr int kVecBytes = kLanes * 4;

TM_INLINE VecI broadcast_four(const int8_t* p) {
  int32_t i;
  std::memcpy(&i, p, 4);
  return broadcast_int(i);
}

}  // namespace turbomind::TM_ISA_NS
