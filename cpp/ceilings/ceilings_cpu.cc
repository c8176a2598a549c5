#include "ceilings/ceilings_kernels.h"
#include "cpu/isa_build.h"
#include "cpu/tile.h"
#include "cpu/vec.h"

namespace turbomind::TM_ISA_NS {

namespace {

float read_sum(const uint8_t* p, size_t bytes) {
  constexpr int kSums = 8;  // hides the latency of the additions
  VecF sum[kSums];
#pragma GCC unroll 8
  for (int s = 0; s < kSums; ++s) sum[s] = zero();
  const float* f = reinterpret_cast<const float*>(p);
  for (size_t i = 0; i < bytes / 4; i += kSums * kLanes) {
    // Past the end of a 4 KiB page the hardware's prefetchers stop.
#pragma GCC unroll 8
    for (int line = 0; line < kSums * kLanes * 4; line += 64) {
      __builtin_prefetch(p + i * 4 + line + 4096, 0, 2);
    }
#pragma GCC unroll 8
    for (int s = 0; s < kSums; ++s) sum[s] = sum[s] + load(f + i + s * kLanes);
  }
#pragma GCC unroll 8
  for (int s = 1; s < kSums; ++s) sum[0] = sum[0] + sum[s];
  return reduce_add(sum[0]);
}

// Keeps a register's value unknown to the compiler, so that the products stay.
#if TM_HAS_AVX2
inline void opaque(VecF& a) {
  asm volatile("" : "+v"(a.v));
}
#elif defined(__x86_64__)
inline void opaque(VecF& a) {
  asm volatile("" : "+x"(a.lo), "+x"(a.hi));
}
#else
inline void opaque(VecF& a) {
  asm volatile("" : "+w"(a.lo), "+w"(a.hi));
}
#endif

#if TM_HAS_TILES

double tile_products(int64_t rounds) {
  alignas(64) static const uint8_t zeros[kTileBytes] = {};
  tile_configure(kTileRows);
  tile_load<4>(zeros, kTileRowBytes);
  tile_load<5>(zeros, kTileRowBytes);
  tile_load<6>(zeros, kTileRowBytes);
  tile_load<7>(zeros, kTileRowBytes);
  for (int64_t i = 0; i < rounds; ++i) {
    tile_dot_bf16<0, 4, 6>();
    tile_dot_bf16<1, 4, 7>();
    tile_dot_bf16<2, 5, 6>();
    tile_dot_bf16<3, 5, 7>();
  }
  return 4 * 2.0 * kTileRows * kTileRows * 32;
}

#else

double tile_products(int64_t rounds) {
  constexpr int kSums = TM_HAS_AVX512 ? 24 : TM_HAS_AVX2 ? 12 : 6;
  VecF sum[kSums], b = broadcast(0.5f);
#pragma GCC unroll 24
  for (int s = 0; s < kSums; ++s) sum[s] = zero();
  opaque(b);
#if TM_HAS_BF16_DOT
  const __m512bh pairs = (__m512bh)_mm512_castps_si512(b.v);
#endif
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 24
    for (int s = 0; s < kSums; ++s) {
#if TM_HAS_BF16_DOT
      sum[s].v = _mm512_dpbf16_ps(sum[s].v, pairs, pairs);
#else
      sum[s] = fma(b, b, sum[s]);
#endif
      opaque(sum[s]);
    }
  }
  return (TM_HAS_BF16_DOT ? 4.0 : 2.0) * kLanes * kSums;
}

#endif

#if TM_HAS_AVX2
#if TM_HAS_AVX512
using Bytes = __m512i;
#else
using Bytes = __m256i;
#endif
inline Bytes add_products(Bytes sum, Bytes a, Bytes b) {
#if TM_HAS_BF16_DOT
  return _mm512_dpbusd_epi32(sum, a, b);
#elif TM_HAS_AVX512
  const Bytes pairs = _mm512_maddubs_epi16(a, b);
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#else
  const Bytes pairs = _mm256_maddubs_epi16(a, b);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}
inline void opaque(Bytes& a) {
  asm volatile("" : "+v"(a));
}
#else
// Plain C: what the compiler makes of int32 products.
using Bytes = Int4;
inline Bytes add_products(Bytes sum, Bytes a, Bytes b) {
  return sum + a * b;
}
inline void opaque(Bytes& a) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(a));
#else
  asm volatile("" : "+w"(a));
#endif
}
#endif

double int8_products(int64_t rounds) {
  constexpr int kSums = TM_HAS_AVX512 ? 24 : TM_HAS_AVX2 ? 10 : 6;
  Bytes sum[kSums], b = {};
  opaque(b);
#pragma GCC unroll 24
  for (int s = 0; s < kSums; ++s) sum[s] = b;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 24
    for (int s = 0; s < kSums; ++s) {
      sum[s] = add_products(sum[s], b, b);
      opaque(sum[s]);
    }
  }
  return 2.0 * kSums * sizeof(Bytes) / (TM_HAS_AVX2 ? 1 : 4);
}

}  // namespace

const CeilingKernels& ceiling_kernels() {
  static constexpr CeilingKernels kernels = {read_sum, tile_products, int8_products};
  return kernels;
}

}  // namespace turbomind::TM_ISA_NS
