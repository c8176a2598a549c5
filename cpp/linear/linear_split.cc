#include "linear/linear_split.h"

namespace turbomind {

namespace {

constexpr int64_t kMaxPieceRows = 512;
constexpr int64_t kMaxPiecePanels = 64;

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Returns the panels of a piece of few rows: no more than `widest`, and so many that the busiest of
// the workers has at most an eighth more than an equal share, where that is possible.
int64_t even_panels(int64_t widest, int64_t panels, int64_t unit, int64_t block, int threads) {
  const int64_t share = ceil_div(panels, threads);
  int64_t width = widest;
  while (width > unit) {
    const int64_t busiest = std::min(panels, ceil_div(ceil_div(panels, width), threads) * width);
    if (busiest * 8 <= share * 9) break;
    width = width > block ? width - block : std::max(unit, width / 2);
  }
  return width;
}

}  // namespace

// Enough pieces to keep all workers busy to the end; more rows in a piece use its weights longer.
Split split_linear(const LinearKernel& kernel, int64_t m, int64_t panels, int64_t k_blocks,
                   Epilogue epilogue, int threads) {
  Split s;
  s.row_pieces = ceil_div(m, kMaxPieceRows);
  int64_t pieces = int64_t{threads} * 8;
  int64_t most = kMaxPiecePanels;
  if (m > kernel.block_rows && k_blocks > kernel.chunk_k_blocks) {
    // Chunked: a piece as wide as its sums and x allow in the second-level cache, half as wide
    // where all of x fits beside them and stays from piece to piece.
    const int64_t x_block_bytes = kernel.x_type == XType::int8 ? 128 : kKBlock * 2;
    const int64_t x_bytes = std::min(m, kMaxPieceRows) * k_blocks * x_block_bytes;
    most = x_bytes <= (1 << 20) ? kernel.piece_panels / 2 : kernel.piece_panels;
    pieces = round_up(ceil_div(panels, most), threads);
  }
  s.panels = round_up(ceil_div(panels, pieces), kernel.block_panels);
  s.panels = std::max<int64_t>(kernel.block_panels, std::min(s.panels, most));
  if (m <= kFewRows && threads > 1) {
    const int64_t unit = is_gated(epilogue) ? 2 : 1;
    s.panels = even_panels(s.panels, panels, unit, kernel.block_panels, threads);
  }
  s.panel_pieces = ceil_div(panels, s.panels);
  if (threads > 1 && s.panel_pieces * s.row_pieces < threads) {
    s.row_pieces = ceil_div(threads, s.panel_pieces);
  }
  s.rows = round_up(ceil_div(m, s.row_pieces), kernel.block_rows);
  s.row_pieces = ceil_div(m, s.rows);
  return s;
}

}  // namespace turbomind
