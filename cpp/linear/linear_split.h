// The split of a product on the CPU into pieces, each computed by one worker at once.
#pragma once

#include <algorithm>
#include <cstdint>

#include "linear/linear_kernels.h"

namespace turbomind {

// Products of so few rows use each weight once or twice: memory sets their pace.
constexpr int64_t kFewRows = 16;

struct Split {
  int64_t rows = 0, panels = 0;  // of a piece
  int64_t row_pieces = 0, panel_pieces = 0;

  int64_t count() const { return row_pieces * panel_pieces; }
};

// `panels`, `k_blocks`: of the whole weight. Pairs of gate and up panels stay together.
Split split_linear(const LinearKernel& kernel, int64_t m, int64_t panels, int64_t k_blocks,
                   Epilogue epilogue, int threads);

// Piece i of [0, split.count()): pieces of the same panels follow each other.
inline LinearPiece piece_of(const Split& s, int64_t i, int64_t m, int64_t panels) {
  LinearPiece p;
  p.row_begin = i % s.row_pieces * s.rows;
  p.row_end = std::min(m, p.row_begin + s.rows);
  p.panel_begin = i / s.row_pieces * s.panels;
  p.panel_end = std::min(panels, p.panel_begin + s.panels);
  return p;
}

}  // namespace turbomind
