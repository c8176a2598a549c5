// Small matrix products against the K and V blocks of a page. For files compiled once per
// instruction set.
//
// c[m][16 panels] = a[m][k] * b, where b is `panels` panels of 16 columns, each stored
// [k/pair][16][pair]. One accumulator per element, in order of k: a row's result depends on nothing
// but the row.
#pragma once

#include "cpu/tile.h"
#include "cpu/vec.h"

namespace turbomind::TM_ISA_NS {

constexpr int kPanel = 16;
constexpr int kLineBytes = 64;  // of a cache line, and of one step of a panel
constexpr int kVecsPerPanel = kPanel / kLanes;
#if TM_HAS_AVX512
constexpr int kMaxPanels = 4;
// Few rows are a matter of memory: one panel at a time reads b from its first to its last byte.
constexpr int kNarrowRows = 8;
#else
constexpr int kMaxPanels = 1;
constexpr int kNarrowRows = 0;
#endif

// How one step of k is multiplied. Rows is what the register file holds beside kMaxPanels panels.
struct FmaF32 {
  using A = float;
  using B = float;
  struct Vec {
    VecF v;
  };
  static constexpr int kPair = 1;
  static constexpr int kRows = TM_HAS_AVX2 ? 6 : 2;
  static TM_INLINE Vec load_b(const B* p) { return {load(p)}; }
  static TM_INLINE VecF multiply(VecF acc, const A* a, Vec b) {
    return fma(broadcast(a[0]), b.v, acc);
  }
};

struct FmaBf16 {
  using A = float;
  using B = uint16_t;
  struct Vec {
    VecF even, odd;
  };
  static constexpr int kPair = 2;
  static constexpr int kRows = TM_HAS_AVX2 ? 5 : 2;
  static TM_INLINE Vec load_b(const B* p) {
    Vec b;
    load_bf16_pairs(p, b.even, b.odd);
    return b;
  }
  static TM_INLINE VecF multiply(VecF acc, const A* a, Vec b) {
    return fma(broadcast(a[1]), b.odd, fma(broadcast(a[0]), b.even, acc));
  }
};

// Queries and weights are float32 on every set, for none of them multiplies float16.
struct FmaF16 : FmaBf16 {
  static TM_INLINE Vec load_b(const B* p) {
    Vec b;
    load_f16_pairs(p, b.even, b.odd);
    return b;
  }
};

#if TM_HAS_BF16_DOT
struct DotBf16 {
  using A = uint16_t;
  using B = uint16_t;
  struct Vec {
    __m512i v;
  };
  static constexpr int kPair = 2;
  static constexpr int kRows = 6;
  static TM_INLINE Vec load_b(const B* p) { return {_mm512_loadu_si512(p)}; }
  static TM_INLINE VecF multiply(VecF acc, const A* a, Vec b) { return dot_bf16(acc, a, b.v); }
};
#endif

template <class Kind>
struct Product {
  const typename Kind::A* a;
  int64_t lda;
  const typename Kind::B* b;
  int64_t panel_stride;  // elements between panels
  int steps;             // k / pair
  float* c;
  int64_t ldc;
  const float* decay;  // null: c = product; else c[m] = c[m] * decay[m] + product (not for tiles)
  bool add;            // tiles only: c += product
  // Bytes from b to the block that will be multiplied next: as b is read, that is brought into the
  // second cache, from its first to its last byte: the hardware cannot predict where pages lie.
  // 0: nothing follows.
  int64_t ahead;
};

template <class Kind, int kRows, int kPanels>
static void micro_product(const Product<Kind>& g) {
  constexpr int kVecs = kPanels * kVecsPerPanel;
  VecF acc[kRows][kVecs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < kVecs; ++n) acc[r][n] = zero();
  }
  const typename Kind::A* a = g.a;
  const typename Kind::B* b = g.b;
  const char* next = reinterpret_cast<const char*>(g.b) + g.ahead;
  for (int k = 0; k < g.steps; ++k, a += Kind::kPair, b += kPanel * Kind::kPair) {
    typename Kind::Vec bv[kVecs];
#pragma GCC unroll 4
    for (int n = 0; n < kPanels; ++n, next += kLineBytes) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
    for (int n = 0; n < kVecs; ++n) {
      bv[n] = Kind::load_b(b + n / kVecsPerPanel * g.panel_stride +
                           n % kVecsPerPanel * kLanes * Kind::kPair);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < kVecs; ++n) acc[r][n] = Kind::multiply(acc[r][n], a + r * g.lda, bv[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float* c = g.c + r * g.ldc;
#pragma GCC unroll 4
    for (int n = 0; n < kVecs; ++n, c += kLanes) {
      store(c, g.decay ? fma(load(c), broadcast(g.decay[r]), acc[r][n]) : acc[r][n]);
    }
  }
}

template <class Kind, int kRows>
static void micro_panels(const Product<Kind>& g, int panels) {
  if constexpr (kMaxPanels > 1 && kRows <= Kind::kRows) {
    if (panels == 2) return micro_product<Kind, kRows, 2>(g);
    if (panels == 3) return micro_product<Kind, kRows, 3>(g);
    if (panels == 4) return micro_product<Kind, kRows, 4>(g);
  }
  micro_product<Kind, kRows, 1>(g);
}

template <class Kind, int kRows>
static void micro_rows(const Product<Kind>& g, int rows, int panels) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return micro_rows<Kind, kRows - 1>(g, rows, panels);
  }
  micro_panels<Kind, kRows>(g, panels);
}

// Pieces of nearly equal size, so that none of them is too small to fill the pipelines.
template <class Kind>
static void product(const Product<Kind>& whole, int rows, int panels) {
  constexpr int kTallest = Kind::kRows > kNarrowRows ? Kind::kRows : kNarrowRows;
  const bool narrow = rows <= kNarrowRows;
  const int most_rows = narrow ? kNarrowRows : Kind::kRows, most_panels = narrow ? 1 : kMaxPanels;
  const int row_pieces = (rows + most_rows - 1) / most_rows;
  const int panel_pieces = (panels + most_panels - 1) / most_panels;
  for (int i = 0, n = 0; i < panel_pieces; ++i) {
    const int width = panels / panel_pieces + (i < panels % panel_pieces);
    for (int j = 0, m = 0; j < row_pieces; ++j) {
      const int height = rows / row_pieces + (j < rows % row_pieces);
      Product<Kind> g = whole;
      g.a += m * g.lda;
      g.b += n * g.panel_stride;
      g.c += m * g.ldc + n * kPanel;
      if (g.decay) g.decay += m;
      if (m > 0) g.ahead = 0;
      micro_rows<Kind, kTallest>(g, height, width);
      m += height;
    }
    n += width;
  }
}

#if TM_HAS_TILES

static TM_INLINE void prefetch_tile(const uint16_t* p) {
  for (int i = 0; i < kTileRows; ++i) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + i * kTileRowBytes, 0, 2);
  }
}

// Two tiles of rows (the second only if kTall) by two panels (the second only if kWide). `rows` of
// a tile are set by tile_configure; A tiles are 4 and 7, B tiles 5 and 6.
template <bool kTall, bool kWide>
static void tile_block(const Product<DotBf16>& g) {
  const int64_t a_stride = g.lda * 2, ahead = g.ahead / 2, c_stride = g.ldc * 4;
  if (g.add) {
    tile_load<0>(g.c, c_stride);
    if constexpr (kWide) tile_load<1>(g.c + kPanel, c_stride);
    if constexpr (kTall) tile_load<2>(g.c + kTileRows * g.ldc, c_stride);
    if constexpr (kTall && kWide) tile_load<3>(g.c + kTileRows * g.ldc + kPanel, c_stride);
  } else {
    tile_zero<0>();
    if constexpr (kWide) tile_zero<1>();
    if constexpr (kTall) tile_zero<2>();
    if constexpr (kTall && kWide) tile_zero<3>();
  }
  for (int k = 0; k < g.steps; k += kTileRows) {
    if (ahead) {
      prefetch_tile(g.b + k * 2 * kPanel + ahead);
      if constexpr (kWide) prefetch_tile(g.b + g.panel_stride + k * 2 * kPanel + ahead);
    }
    tile_load<4>(g.a + 2 * k, a_stride);
    tile_load<5>(g.b + k * 2 * kPanel, kTileRowBytes);
    tile_dot_bf16<0, 4, 5>();
    if constexpr (kWide) {
      tile_load<6>(g.b + g.panel_stride + k * 2 * kPanel, kTileRowBytes);
      tile_dot_bf16<1, 4, 6>();
    }
    if constexpr (kTall) {
      tile_load<7>(g.a + kTileRows * g.lda + 2 * k, a_stride);
      tile_dot_bf16<2, 7, 5>();
      if constexpr (kWide) tile_dot_bf16<3, 7, 6>();
    }
  }
  tile_store<0>(g.c, c_stride);
  if constexpr (kWide) tile_store<1>(g.c + kPanel, c_stride);
  if constexpr (kTall) tile_store<2>(g.c + kTileRows * g.ldc, c_stride);
  if constexpr (kTall && kWide) tile_store<3>(g.c + kTileRows * g.ldc + kPanel, c_stride);
}

// A product on tiles, taken in steps, so that the caller can put other work between them. Whole
// tiles of rows are read and written: a and c have kTileRows rows to spare.
struct TileProduct {
  Product<DotBf16> whole;
  int rows = 0, panels = 0;
  int m = 0, n = 0;  // where the next step begins
};

// Takes one step; false when none is left.
static bool tile_step(TileProduct& t) {
  if (t.n >= t.panels) return false;
  Product<DotBf16> g = t.whole;
  g.a += t.m * g.lda;
  g.b += t.n * g.panel_stride;
  g.c += t.m * g.ldc + t.n * kPanel;
  if (t.m > 0) g.ahead = 0;
  const bool tall = t.m + kTileRows < t.rows, wide = t.n + 1 < t.panels;
  if (tall && wide) tile_block<true, true>(g);
  if (tall && !wide) tile_block<true, false>(g);
  if (!tall && wide) tile_block<false, true>(g);
  if (!tall && !wide) tile_block<false, false>(g);
  t.m += 2 * kTileRows;
  if (t.m >= t.rows) t.m = 0, t.n += 2;
  return true;
}

#endif

}  // namespace turbomind::TM_ISA_NS
