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
  static constexpr bool kPipelined = false;
  static constexpr bool kUnpacks = false;

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

  static void block(const LinearJob& job, const Visit& v, const uint8_t* w, float* acc,
                    int64_t acc_stride, Prefetch prefetch, Unfinished&) {
    const uint8_t* x = job.x + v.row * job.x_stride + v.k_begin * kTileRowBytes;
    const int64_t n = v.k_end - v.k_begin, pb = job.panel_bytes;
    const bool from_zero = v.k_begin == 0;
    if (v.panels == kPanels) {
      return product<4>(x, job.x_stride, w, pb, n, from_zero, acc, acc_stride, prefetch);
    }
    for (int c = 0; c < v.panels; ++c, prefetch.panels = 0) {
      product<1>(x, job.x_stride, w + c * pb, pb, n, from_zero, acc + c * 16, acc_stride, prefetch);
    }
  }
};

// The operand that tile loads ask the first-level cache not to keep.
enum class Streamed { none, rows, weights };

// Many rows: 32 rows times two panels.
struct TileKernel {
  static constexpr int kRows = 32;
  static constexpr int kRowAlign = 32;
  static constexpr int kPanels = 2;
  static constexpr bool kPipelined = true;
  static constexpr bool kUnpacks = false;

  static void begin(const LinearPiece&) { tile_configure(kTileRows); }

  // 16 rows of x; the tail has a stride of its own.
  struct Rows {
    const uint8_t* x;
    int64_t stride;
  };
  static Rows rows_at(const LinearJob& job, int64_t row, int64_t k_begin) {
    const int64_t offset = k_begin * kTileRowBytes;
    if (row >= job.x_tail_begin) return {job.x_tail + offset, job.x_tail_stride};
    return {job.x + row * job.x_stride + offset, job.x_stride};
  }
  template <int T, bool kStream>
  static void load(const void* p, int64_t stride) {
    if constexpr (kStream)
      tile_load_stream<T>(p, stride);
    else
      tile_load<T>(p, stride);
  }

  // What happens beside the products of `steps` K blocks: prefetches of weights, of x and of sums,
  // and the epilogue of the block before.
  struct Beside {
    const LinearJob& job;
    const Prefetch& prefetch;
    Unfinished& unfinished;
    const uint8_t* x_next;
    int64_t acc_lines, lines_per_step, rows_per_step;

    Beside(const LinearJob& job, const Visit& v, int64_t acc_stride, const Prefetch& prefetch,
           Unfinished& unfinished)
        : job(job), prefetch(prefetch), unfinished(unfinished) {
      const int64_t steps = v.k_end > v.k_begin ? v.k_end - v.k_begin : 1;
      x_next = job.x + (v.row + kRows) * job.x_stride + v.k_begin * kTileRowBytes;
      acc_lines = prefetch.sums != nullptr ? kRows * acc_stride / 16 : 0;
      lines_per_step = (acc_lines + steps - 1) / steps;
      rows_per_step = (unfinished.left() + steps - 1) / steps;
    }
    void step(int64_t k) {
      fetch_tiles(prefetch, job.panel_bytes, k);
      for (int r = 0; r < prefetch.x_rows; ++r) {
        __builtin_prefetch(x_next + r * job.x_stride + k * kTileRowBytes, 0, 2);
      }
      const int64_t end = smaller(acc_lines, (k + 1) * lines_per_step);
      for (int64_t i = k * lines_per_step; i < end; ++i) {
        __builtin_prefetch(prefetch.sums + i * 16, 1, 3);
      }
      if (rows_per_step > 0) unfinished.finish(rows_per_step);
    }
  };

  template <int R, int C, Streamed kStreamed>
  static void product(const LinearJob& job, const Visit& v, const uint8_t* w, float* acc,
                      int64_t acc_stride, Beside beside) {
    constexpr bool kStreamX = kStreamed == Streamed::rows,
                   kStreamW = kStreamed == Streamed::weights;
    const int64_t stride = acc_stride * 4, panel_bytes = job.panel_bytes;
    const bool from_zero = v.k_begin == 0;
    const Rows upper = rows_at(job, v.row, v.k_begin);
    const Rows lower = R == 2 ? rows_at(job, v.row + kTileRows, v.k_begin) : upper;
    float* acc1 = acc + kTileRows * acc_stride;
    start_sum<0>(from_zero, acc, stride);
    if constexpr (C == 2) start_sum<1>(from_zero, acc + 16, stride);
    if constexpr (R == 2) start_sum<2>(from_zero, acc1, stride);
    if constexpr (R == 2 && C == 2) start_sum<3>(from_zero, acc1 + 16, stride);
    for (int64_t k = 0; k < v.k_end - v.k_begin; ++k) {
      load<6, kStreamW>(w + k * kTileBytes, kTileRowBytes);
      load<4, kStreamX>(upper.x + k * kTileRowBytes, upper.stride);
      tile_dot_bf16<0, 4, 6>();
      if constexpr (C == 2) {
        load<7, kStreamW>(w + panel_bytes + k * kTileBytes, kTileRowBytes);
        tile_dot_bf16<1, 4, 7>();
      }
      if constexpr (R == 2) {
        load<5, kStreamX>(lower.x + k * kTileRowBytes, lower.stride);
        tile_dot_bf16<2, 5, 6>();
      }
      if constexpr (R == 2 && C == 2) tile_dot_bf16<3, 5, 7>();
      beside.step(k);
    }
    tile_store<0>(acc, stride);
    if constexpr (C == 2) tile_store<1>(acc + 16, stride);
    if constexpr (R == 2) tile_store<2>(acc1, stride);
    if constexpr (R == 2 && C == 2) tile_store<3>(acc1 + 16, stride);
  }

  template <Streamed kStreamed>
  static void streamed_block(const LinearJob& job, const Visit& v, const uint8_t* w, float* acc,
                             int64_t acc_stride, const Beside& beside) {
    const bool tall = v.rows > kTileRows, wide = v.panels == 2;
    const auto call = tall ? (wide ? product<2, 2, kStreamed> : product<2, 1, kStreamed>)
                           : (wide ? product<1, 2, kStreamed> : product<1, 1, kStreamed>);
    call(job, v, w, acc, acc_stride, beside);
  }
  static void block(const LinearJob& job, const Visit& v, const uint8_t* w, float* acc,
                    int64_t acc_stride, const Prefetch& prefetch, Unfinished& unfinished) {
    const bool rows_stay = job.order.stays == TileOrder::Stays::rows;
    const auto call = !job.order.stream ? streamed_block<Streamed::none>
                      : rows_stay       ? streamed_block<Streamed::weights>
                                        : streamed_block<Streamed::rows>;
    call(job, v, w, acc, acc_stride, Beside(job, v, acc_stride, prefetch, unfinished));
  }
};

}  // namespace

const LinearKernel bf16_tile_small_kernel = {TileSmallKernel::kRows,
                                             TileSmallKernel::kPanels,
                                             16,
                                             TileSmallKernel::kPanels,
                                             XType::bf16,
                                             false,
                                             false,
                                             run_piece<TileSmallKernel>};

// A chunk of x comes from the third-level cache once per 28 panels, whose sums (512 rows of 448
// float32) and x fit a second-level cache of 2 MiB.
const LinearKernel bf16_tile_kernel = {TileKernel::kRows,
                                       TileKernel::kPanels,
                                       TileOrder().chunk_k_blocks,
                                       28,
                                       XType::bf16,
                                       true,
                                       true,
                                       run_piece<TileKernel>};

}  // namespace turbomind::TM_ISA_NS

#endif
