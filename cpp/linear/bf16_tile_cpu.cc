// bfloat16 weights times bfloat16 activations on the tile unit. A packed panel is a sequence of B
// tiles as it stands.
#include "cpu/tile.h"
#include "linear/linear_loop.h"

#if TM_HAS_TILES

namespace turbomind::TM_ISA_NS {

namespace {

// Fetches the K block's tile of each panel.
inline void fetch_tiles(const Prefetch& p, int64_t panel_bytes, int64_t k_block) {
  for (int line = 0; line < kTileBytes; line += 64) {
    fetch(p, panel_bytes, k_block * kTileBytes + line);
  }
}

template <int T>
inline void start_sum(bool from_zero, const float* acc, int64_t stride_bytes) {
  if (from_zero)
    tile_zero<T>();
  else
    tile_load<T>(acc, stride_bytes);
}

// Up to 16 rows, straight from row-major x: four panels share each tile of x.
struct TileSmallKernel {
  static constexpr int kRows = 16;
  static constexpr int kRowAlign = 16;
  static constexpr int kPanels = 4;
  static constexpr int kKBlockBytes = kTileBytes;
  static constexpr int kChunk = 16;

  static void begin(const LinearPiece& p) {
    tile_configure(static_cast<int>(p.row_end - p.row_begin));
  }

  template <int C>
  static void product(const uint8_t* x, int64_t x_stride, const uint8_t* w, int64_t panel_bytes,
                      int64_t k_blocks, bool from_zero, float* acc, int64_t acc_stride,
                      const Prefetch& prefetch) {
    const int64_t stride = acc_stride * 4;
    start_sum<0>(from_zero, acc, stride);
    if constexpr (C == 4) {
      start_sum<1>(from_zero, acc + 16, stride);
      start_sum<2>(from_zero, acc + 32, stride);
      start_sum<3>(from_zero, acc + 48, stride);
    }
    for (int64_t k = 0; k < k_blocks; ++k) {
      const uint8_t* b = w + k * kTileBytes;
      fetch_tiles(prefetch, panel_bytes, k);
      tile_load<4>(x + k * kTileRowBytes, x_stride);
      tile_load<5>(b, kTileRowBytes);
      tile_dot_bf16<0, 4, 5>();
      if constexpr (C == 4) {
        tile_load<6>(b + panel_bytes, kTileRowBytes);
        tile_dot_bf16<1, 4, 6>();
        tile_load<7>(b + 2 * panel_bytes, kTileRowBytes);
        tile_dot_bf16<2, 4, 7>();
        tile_load<5>(b + 3 * panel_bytes, kTileRowBytes);
        tile_dot_bf16<3, 4, 5>();
      }
    }
    tile_store<0>(acc, stride);
    if constexpr (C == 4) {
      tile_store<1>(acc + 16, stride);
      tile_store<2>(acc + 32, stride);
      tile_store<3>(acc + 48, stride);
    }
  }

  static void block(const LinearJob& job, int64_t row, int, const uint8_t* w, int panels,
                    int64_t k_begin, int64_t k_end, float* acc, int64_t acc_stride,
                    Prefetch prefetch) {
    const uint8_t* x = job.x + row * job.x_stride + k_begin * kTileRowBytes;
    const int64_t n = k_end - k_begin, pb = job.panel_bytes;
    const bool from_zero = k_begin == 0;
    if (panels == kPanels) {
      return product<4>(x, job.x_stride, w, pb, n, from_zero, acc, acc_stride, prefetch);
    }
    for (int c = 0; c < panels; ++c, prefetch.panels = 0) {
      product<1>(x, job.x_stride, w + c * pb, pb, n, from_zero, acc + c * 16, acc_stride, prefetch);
    }
  }
};

// Many rows: 32 rows times two panels.
struct TileKernel {
  static constexpr int kRows = 32;
  static constexpr int kRowAlign = 32;
  static constexpr int kPanels = 2;
  static constexpr int kKBlockBytes = kTileBytes;
  // Two panels of 16 blocks are 32 KiB, two thirds of the first-level cache; the chunk of 512 rows
  // of x is 512 KiB of the second.
  static constexpr int kChunk = 16;

  static void begin(const LinearPiece&) { tile_configure(kTileRows); }

  // 16 rows of x; the tail has a stride of its own.
  struct Rows {
    const uint8_t* x;
    int64_t stride;
    void load_to_4(int64_t k) const { tile_load<4>(x + k * kTileRowBytes, stride); }
    void load_to_5(int64_t k) const { tile_load<5>(x + k * kTileRowBytes, stride); }
  };
  static Rows rows_at(const LinearJob& job, int64_t row, int64_t k_begin) {
    const int64_t offset = k_begin * kTileRowBytes;
    if (row >= job.x_tail_begin) return {job.x_tail + offset, job.x_tail_stride};
    return {job.x + row * job.x_stride + offset, job.x_stride};
  }

  template <int R, int C>
  static void product(const LinearJob& job, int64_t row, int64_t k_begin, int64_t k_end,
                      const uint8_t* w, float* acc, int64_t acc_stride, const Prefetch& prefetch) {
    const int64_t stride = acc_stride * 4, panel_bytes = job.panel_bytes;
    const bool from_zero = k_begin == 0;
    const Rows upper = rows_at(job, row, k_begin);
    const Rows lower = R == 2 ? rows_at(job, row + kTileRows, k_begin) : upper;
    const uint8_t* x_next = job.x + (row + kRows) * job.x_stride + k_begin * kTileRowBytes;
    float* acc1 = acc + kTileRows * acc_stride;
    start_sum<0>(from_zero, acc, stride);
    if constexpr (C == 2) start_sum<1>(from_zero, acc + 16, stride);
    if constexpr (R == 2) start_sum<2>(from_zero, acc1, stride);
    if constexpr (R == 2 && C == 2) start_sum<3>(from_zero, acc1 + 16, stride);
    for (int64_t k = 0; k < k_end - k_begin; ++k) {
      fetch_tiles(prefetch, panel_bytes, k);
      for (int r = 0; r < prefetch.x_rows; ++r) {
        __builtin_prefetch(x_next + r * job.x_stride + k * kTileRowBytes, 0, 2);
      }
      tile_load<6>(w + k * kTileBytes, kTileRowBytes);
      upper.load_to_4(k);
      tile_dot_bf16<0, 4, 6>();
      if constexpr (C == 2) {
        tile_load<7>(w + panel_bytes + k * kTileBytes, kTileRowBytes);
        tile_dot_bf16<1, 4, 7>();
      }
      if constexpr (R == 2) {
        lower.load_to_5(k);
        tile_dot_bf16<2, 5, 6>();
      }
      if constexpr (R == 2 && C == 2) tile_dot_bf16<3, 5, 7>();
    }
    tile_store<0>(acc, stride);
    if constexpr (C == 2) tile_store<1>(acc + 16, stride);
    if constexpr (R == 2) tile_store<2>(acc1, stride);
    if constexpr (R == 2 && C == 2) tile_store<3>(acc1 + 16, stride);
  }

  static void block(const LinearJob& job, int64_t row, int rows, const uint8_t* w, int panels,
                    int64_t k_begin, int64_t k_end, float* acc, int64_t acc_stride,
                    const Prefetch& prefetch) {
    const auto call = rows > kTileRows ? (panels == 2 ? product<2, 2> : product<2, 1>)
                                       : (panels == 2 ? product<1, 2> : product<1, 1>);
    call(job, row, k_begin, k_end, w, acc, acc_stride, prefetch);
  }
};

}  // namespace

const LinearKernel bf16_tile_small_kernel = {TileSmallKernel::kRows,
                                             TileSmallKernel::kPanels,
                                             TileSmallKernel::kChunk,
                                             TileSmallKernel::kPanels,
                                             true,
                                             false,
                                             run_piece<TileSmallKernel>};

// A chunk of x comes from the third-level cache once per 28 panels, whose sums (512 rows of 448
// float32) and x fit a second-level cache of 2 MiB.
const LinearKernel bf16_tile_kernel = {
    TileKernel::kRows,    TileKernel::kPanels, TileKernel::kChunk, 28, true, true,
    run_piece<TileKernel>};

}  // namespace turbomind::TM_ISA_NS

#endif
