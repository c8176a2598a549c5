// The seam between the dense weight formats and their kernels, which are compiled once per ISA.
#pragma once

#include <cstdint>

#include "core/isa.h"
#include "core/tile_order.h"
#include "linear/weight_format.h"

namespace turbomind {

// Output features per packed panel. A panel holds all of K, k ascending, 16 outputs side by side.
constexpr int64_t kPanel = 16;

// One product, shared by all its pieces. Plain data: kernels use nothing but these fields.
struct LinearJob {
  const uint8_t* w = nullptr;  // packed panels
  int64_t panel_bytes = 0;
  int64_t k_blocks = 0;        // blocks of kKBlock
  const uint8_t* x = nullptr;  // rows in the kernel's type
  int64_t x_stride = 0;        // bytes
  // LinearKernel::whole_tiles: the last rows, padded with zero rows to 16; they start at
  // row x_tail_begin (>= m: none), which is a multiple of 16.
  const uint8_t* x_tail = nullptr;
  int64_t x_tail_begin = 0;
  int64_t x_tail_stride = 0;  // bytes
  void* y = nullptr;
  int64_t y_stride = 0;  // elements
  int64_t y_cols = 0;
  int64_t y_zero_end = 0;  // columns [y_cols, y_zero_end) are set to zero
  bool y_bf16 = false;
  const float* bias = nullptr;
  const float* addend = nullptr;
  int64_t addend_stride = 0;
  int64_t n = 0;
  Epilogue epilogue = Epilogue::store;
  TileOrder order;  // chunk_k_blocks: of any kernel
};

// The piece of a product that one worker computes at once.
struct LinearPiece {
  int64_t row_begin = 0, row_end = 0;  // row_begin is a multiple of block_rows
  int64_t panel_begin = 0, panel_end = 0;
  // Of the piece that the worker most likely takes next, which this one's end prefetches; -1: none.
  int64_t next_panel = -1;
};

struct LinearKernel {
  int block_rows = 0;  // rows and panels of the register block
  int block_panels = 0;
  int chunk_k_blocks = 0;    // weights of this many K blocks are used for all rows before the next
  int piece_panels = 0;      // panels per piece at most, when K is chunked and rows are many
  bool bf16_x = false;       // else float32
  bool whole_tiles = false;  // reads x by 16 rows at a time
  bool ordered = false;      // takes its chunk and order from Context::tile_order
  // `acc` is the worker's scratch: linear_scratch_floats(kernel, piece) floats, 64-byte aligned.
  void (*run)(const LinearJob& job, const LinearPiece& piece, float* acc) = nullptr;
};

// Partial sums of the whole piece, for rows padded to whole tiles.
inline int64_t linear_scratch_floats(const LinearKernel& k, const LinearPiece& p) {
  const int64_t rows = round_up(p.row_end - p.row_begin, k.block_rows);
  return rows * round_up(p.panel_end - p.panel_begin, k.block_panels) * kPanel;
}

// The kernel of each format. `bf16_small` is for up to 16 rows, `bf16_eight` for 7 or 8; their
// arithmetic is that of `bf16`.
struct DenseKernels {
  const LinearKernel* bf16_eight = nullptr;
  const LinearKernel* bf16_small = nullptr;
  const LinearKernel* bf16 = nullptr;
  const LinearKernel* f16 = nullptr;
  const LinearKernel* f32 = nullptr;
};

const DenseKernels& dense_kernels(Isa isa);

}  // namespace turbomind
