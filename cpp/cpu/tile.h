// The AMX tile unit, or its emulation in AVX-512 vectors (amx_emulated): same tiles, same
// arithmetic.
//
// One shape class serves every kernel: tiles 0-3 accumulate [rows][16] float32, tile 4 holds
// A [rows][32] bfloat16, tiles 5-7 hold 16 rows of 64 bytes: B, which is 1 KiB of a packed panel
// (16 pairs of k, 16 outputs), or a second A when rows is 16.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/isa_build.h"

#if TM_HAS_TILES

#if TM_ISA_LEVEL == TM_LEVEL_AMX_EMULATED
#include <immintrin.h>
#endif

namespace turbomind::TM_ISA_NS {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;

#if TM_ISA_LEVEL == TM_LEVEL_AMX

// Configures and clears all tiles of the calling thread. Each piece of work calls it first, for
// other libraries of the process may have changed the configuration.
static inline void tile_configure(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int t = 0; t < 8; ++t) {
    config.row_bytes[t] = kTileRowBytes;
    config.rows[t] = static_cast<uint8_t>(t <= 4 ? rows : kTileRows);
  }
  // The operand makes the compiler write all 64 bytes before the instruction.
  asm volatile("ldtilecfg %0" ::"m"(config));
}
template <int T>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
// What an instruction reads: memory of any length from `p` on. Unlike a clobber of all memory, the
// operand lets the compiler keep the fields of other objects in registers.
#define TM_TILE_SOURCE(p) "m"(*static_cast<const uint8_t (*)[]>(p))
template <int T>
static inline void tile_load(const void* p, int64_t stride_bytes) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride_bytes),
               TM_TILE_SOURCE(p));
}
// The same for data that is not used again soon.
template <int T>
static inline void tile_load_stream(const void* p, int64_t stride_bytes) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride_bytes),
               TM_TILE_SOURCE(p));
}
#undef TM_TILE_SOURCE
template <int T>
static inline void tile_store(void* p, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride_bytes) : "memory");
}
// Tile Acc += tile A x tile B.
template <int Acc, int A, int B>
static inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Acc), "i"(A), "i"(B));
}

#else

struct TileFile {
  alignas(64) uint8_t data[8][kTileBytes];
  int rows[8];
};
static thread_local TileFile tile_file;

static inline void tile_configure(int rows) {
  std::memset(&tile_file, 0, sizeof tile_file);
  for (int t = 0; t < 8; ++t) tile_file.rows[t] = t <= 4 ? rows : kTileRows;
}
template <int T>
static inline void tile_zero() {
  std::memset(tile_file.data[T], 0, kTileBytes);
}
template <int T>
static inline void tile_load(const void* p, int64_t stride_bytes) {
  for (int r = 0; r < tile_file.rows[T]; ++r) {
    std::memcpy(tile_file.data[T] + r * kTileRowBytes,
                static_cast<const uint8_t*>(p) + r * stride_bytes, kTileRowBytes);
  }
}
template <int T>
static inline void tile_load_stream(const void* p, int64_t stride_bytes) {
  tile_load<T>(p, stride_bytes);
}
template <int T>
static inline void tile_store(void* p, int64_t stride_bytes) {
  for (int r = 0; r < tile_file.rows[T]; ++r) {
    std::memcpy(static_cast<uint8_t*>(p) + r * stride_bytes, tile_file.data[T] + r * kTileRowBytes,
                kTileRowBytes);
  }
}

// Replaces subnormals by zeros of the same sign.
static inline __m512 tile_flush(__m512 v) {
  const __mmask16 subnormal = _mm512_fpclass_ps_mask(v, 0x20);
  return _mm512_mask_and_ps(v, subnormal, v, _mm512_set1_ps(-0.0f));
}
static inline void tile_widen(__m512i pairs, __m512& even, __m512& odd) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  even = tile_flush(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
  odd = tile_flush(_mm512_castsi512_ps(_mm512_and_si512(pairs, high)));
}
// TDPBF16PS (Intel SDM, volume 2B): the even and the odd elements of the 16 pairs are summed apart
// by fused steps from zero, then together, then onto the accumulator; subnormals count as zero.
template <int Acc, int A, int B>
static inline void tile_dot_bf16() {
  __m512 b_even[kTileRows], b_odd[kTileRows];
  for (int k = 0; k < kTileRows; ++k) {
    tile_widen(_mm512_load_si512(tile_file.data[B] + k * kTileRowBytes), b_even[k], b_odd[k]);
  }
  for (int r = 0; r < tile_file.rows[Acc]; ++r) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < kTileRows; ++k) {
      int pair;
      std::memcpy(&pair, tile_file.data[A] + r * kTileRowBytes + k * 4, 4);
      __m512 a_even, a_odd;
      tile_widen(_mm512_set1_epi32(pair), a_even, a_odd);
      even = tile_flush(_mm512_fmadd_ps(a_even, b_even[k], even));
      odd = tile_flush(_mm512_fmadd_ps(a_odd, b_odd[k], odd));
    }
    float* acc = reinterpret_cast<float*>(tile_file.data[Acc] + r * kTileRowBytes);
    const __m512 sum = tile_flush(_mm512_add_ps(even, odd));
    _mm512_store_ps(acc, tile_flush(_mm512_add_ps(tile_flush(_mm512_load_ps(acc)), sum)));
  }
}

#endif

}  // namespace turbomind::TM_ISA_NS

#endif  // TM_HAS_TILES
