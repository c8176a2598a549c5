// The seam between the weight formats and their kernels, which are compiled once per ISA.
#pragma once

#include <cstdint>

#include "core/isa.h"
#include "core/tile_order.h"
#include "linear/code_layout.h"
#include "linear/weight_format.h"

namespace turbomind {

// What a kernel reads of x. int8: codes, and an XGroup per row and group of the weight.
enum class XType : uint8_t { f32, bf16, int8 };

// One product, shared by all its pieces. Plain data: kernels use nothing but these fields.
struct LinearJob {
  const uint8_t* w = nullptr;  // packed panels
  int64_t panel_bytes = 0;
  int64_t k_block_bytes = 0;   // of a panel
  int64_t k_blocks = 0;        // of the kernel's values of K: kKBlock, or CodeLayout::k_block()
  const uint8_t* x = nullptr;  // rows in the kernel's type
  int64_t x_stride = 0;        // bytes
  // XType::int8: the weights' layout, and the groups of each row of x.
  CodeLayout codes;
  const XGroup* x_groups = nullptr;
  int64_t x_groups_stride = 0;
  const int32_t* columns = nullptr;  // [k] column of x that each code multiplies; null: its own
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
  int chunk_k_blocks = 0;  // weights of this many K blocks are used for all rows before the next
  int piece_panels = 0;    // panels per piece at most, when K is chunked and rows are many
  XType x_type = XType::f32;
  bool whole_tiles = false;  // reads x by 16 rows at a time
  bool ordered = false;      // takes its chunk and order from Context::tile_order
  // `acc` is the worker's scratch: linear_scratch_floats(kernel, piece) floats, 64-byte aligned.
  void (*run)(const LinearJob& job, const LinearPiece& piece, float* acc) = nullptr;
  int64_t unpacked_bytes = 0;  // of the weights of a panel and K block, where a kernel unpacks them
  // XType::int8: writes the codes and groups of one row of x, [k] float32; codes are padded with
  // zeros to whole K blocks.
  void (*round_row)(const CodeLayout& layout, const float* x, int64_t k, int8_t* codes,
                    XGroup* groups) = nullptr;
};

// Partial sums of the whole piece, for rows padded to whole register blocks.
inline int64_t linear_sum_floats(int block_rows, int block_panels, const LinearPiece& p) {
  const int64_t rows = round_up(p.row_end - p.row_begin, block_rows);
  return rows * round_up(p.panel_end - p.panel_begin, block_panels) * kPanel;
}
// The sums, and after them the unpacked weights of a register block's panels and a chunk of K.
inline int64_t linear_scratch_floats(const LinearKernel& k, const LinearPiece& p) {
  return linear_sum_floats(k.block_rows, k.block_panels, p) +
         int64_t{k.block_panels} * k.chunk_k_blocks * k.unpacked_bytes / 4;
}

// The kernels of dense weights. `bf16_small` is for up to 16 rows, `bf16_eight` for 7 or 8; their
// arithmetic is that of `bf16`.
struct DenseKernels {
  const LinearKernel* bf16_eight = nullptr;
  const LinearKernel* bf16_small = nullptr;
  const LinearKernel* bf16 = nullptr;
  const LinearKernel* f16 = nullptr;
  const LinearKernel* f32 = nullptr;
};

const DenseKernels& dense_kernels(Isa isa);

// The kernels of integer codes, by their bits. chunk_k_blocks is in units of 128 values of K.
struct CodeKernels {
  const LinearKernel* eight = nullptr;
  const LinearKernel* four = nullptr;
};

const CodeKernels& code_kernels(Isa isa);

}  // namespace turbomind
