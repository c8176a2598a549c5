// The loops around a register block, and the epilogue: shared by all dense kernels of one ISA.
#pragma once

#include "cpu/isa_build.h"
#include "cpu/vec.h"
#include "linear/linear_kernels.h"

namespace turbomind::TM_ISA_NS {

// Defined where the instruction set has them.
extern const LinearKernel bf16_dot_kernel, bf16_tile_kernel, bf16_tile_small_kernel;

constexpr int kPanelVecs = 16 / kLanes;
// Weights are prefetched this far ahead in each panel while they are used once (few rows).
constexpr int64_t kAheadKBlocks = 4;

static inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// The lines that the register block prefetches while it computes, line for line in step with its
// own: `panels` panels from `base` on, and x of the `x_rows` rows after its own.
struct Prefetch {
  const uint8_t* base;
  int panels;
  int x_rows;
};

// The cache line at `offset` of each panel, into the second-level cache.
static inline void fetch(const Prefetch& p, int64_t panel_bytes, int64_t offset) {
  for (int i = 0; i < p.panels; ++i) {
    __builtin_prefetch(p.base + i * panel_bytes + offset, 0, 2);
  }
}

// Adds bias and addend of packed columns [col, col + count) to acc; count <= kLanes.
static inline VecF with_bias(const LinearJob& job, int64_t row, int64_t col, int count, VecF acc) {
  if (job.bias != nullptr) acc = acc + load_n(job.bias + col, count);
  if (job.addend != nullptr) {
    acc = acc + load_n(job.addend + row * job.addend_stride + col, count);
  }
  return acc;
}

static inline void store_y(const LinearJob& job, int64_t row, int64_t col, int count, VecF v) {
  const int64_t at = row * job.y_stride + col;
  if (job.y_bf16) {
    store_bf16_n(static_cast<uint16_t*>(job.y) + at, v, count);
  } else {
    float* y = static_cast<float*>(job.y) + at;
    if (job.epilogue == Epilogue::add) v = load_n(y, count) + v;
    store_n(y, v, count);
  }
}

static inline int lanes_left(int64_t end, int64_t col) {
  const int64_t left = end - col;
  return left <= 0 ? 0 : left < kLanes ? static_cast<int>(left) : kLanes;
}

static void zero_padding(const LinearJob& job, int64_t row) {
  for (int64_t c = job.y_cols; c < job.y_zero_end; ++c) {
    const int64_t at = row * job.y_stride + c;
    if (job.y_bf16)
      static_cast<uint16_t*>(job.y)[at] = 0;
    else
      static_cast<float*>(job.y)[at] = 0;
  }
}

// acc holds one row of `panels` panels from `panel` on.
[[maybe_unused]] static void finish_row(const LinearJob& job, int64_t row, int64_t panel,
                                        int panels, const float* acc) {
  const int64_t col0 = panel * 16;
  if (job.epilogue == Epilogue::silu_mul) {
    for (int v = 0; v < panels / 2 * kPanelVecs; ++v) {
      const int at = v / kPanelVecs * 32 + v % kPanelVecs * kLanes;
      const VecF gate = with_bias(job, row, col0 + at, kLanes, load(acc + at));
      const VecF up = with_bias(job, row, col0 + at + 16, kLanes, load(acc + at + 16));
      const int64_t col = panel * 8 + v * kLanes;
      store_y(job, row, col, lanes_left(job.y_cols, col), silu(gate) * up);
    }
  } else {
    for (int v = 0; v < panels * kPanelVecs; ++v) {
      const int64_t col = col0 + v * kLanes;
      const int count = lanes_left(job.n, col);
      store_y(job, row, col, count, with_bias(job, row, col, count, load(acc + v * kLanes)));
    }
  }
  if ((panel + panels) * 16 >= job.n) zero_padding(job, row);
}

// The order in which a piece's weights are used: steps of one chunk of K of one group of panels.
template <class Kernel>
struct Steps {
  struct Step {
    int64_t panel, group, k_begin, k_end;  // k in blocks
    int panels;
  };
  const LinearPiece& p;
  int64_t k_blocks, groups, chunks, per_chunk, ahead;
  // Used once: two chunks, whose border is where prefetching turns to the next panels.
  bool once;

  Steps(const LinearJob& job, const LinearPiece& piece) : p(piece), k_blocks(job.k_blocks) {
    groups = (p.panel_end - p.panel_begin + Kernel::kPanels - 1) / Kernel::kPanels;
    once = p.row_end - p.row_begin <= Kernel::kRows;
    chunks = once ? 2 : (k_blocks + Kernel::kChunk - 1) / Kernel::kChunk;
    per_chunk = (k_blocks + chunks - 1) / chunks;
    ahead = smaller(kAheadKBlocks, k_blocks);
  }
  int64_t count() const { return groups * chunks; }
  // Used once: panel after panel, as they lie in memory. Else chunk after chunk, so that the chunk
  // of x stays in the cache for all panels of the piece.
  Step at(int64_t s) const {
    Step t;
    const int64_t chunk = once ? s % chunks : s / groups;
    t.group = once ? s / chunks : s % groups;
    t.panel = p.panel_begin + t.group * Kernel::kPanels;
    t.panels = static_cast<int>(smaller(Kernel::kPanels, p.panel_end - t.panel));
    t.k_begin = once ? chunk * (k_blocks - ahead) : chunk * per_chunk;
    const int64_t length = !once ? per_chunk : chunk == 0 ? k_blocks - ahead : ahead;
    t.k_end = smaller(t.k_begin + length, k_blocks);
    return t;
  }
  const uint8_t* weights(const LinearJob& job, const Step& t) const {
    return job.w + t.panel * job.panel_bytes + t.k_begin * Kernel::kKBlockBytes;
  }
  // The prefetch of step s; each of the row blocks takes its share.
  Prefetch prefetch(const LinearJob& job, int64_t s, int64_t block, int64_t row_blocks) const {
    if (s + 1 >= count()) return {nullptr, 0, 0};
    const bool same_panels = once && s % 2 == 0;
    const Step next = at(same_panels ? s : s + 1);
    const int64_t first = (block * next.panels + row_blocks - 1) / row_blocks;
    const int64_t last = ((block + 1) * next.panels + row_blocks - 1) / row_blocks;
    const int64_t skip = first * job.panel_bytes + (same_panels ? ahead * Kernel::kKBlockBytes : 0);
    return {weights(job, next) + skip, static_cast<int>(last - first), 0};
  }
};

// Kernel: static members kRows, kRowAlign (of a block's rows), kPanels, kChunk (K blocks),
// kKBlockBytes (weight bytes of one panel and K block), begin(piece) and
// block(job, row, rows, w, panels, k_begin, k_end, acc, acc_stride, prefetch), which adds K blocks
// [k_begin, k_end) to acc (from zero when k_begin is 0).
// For one row the additions run over k ascending whatever the piece, block and chunk are.
template <class Kernel>
static void run_piece(const LinearJob& job, const LinearPiece& p, float* scratch) {
  Kernel::begin(p);
  const Steps<Kernel> steps(job, p);
  const int64_t rows = p.row_end - p.row_begin;
  const int64_t row_blocks = (rows + Kernel::kRows - 1) / Kernel::kRows;
  const int64_t even = (rows + row_blocks - 1) / row_blocks;  // 8 rows: 4 + 4 rather than 6 + 2
  const int64_t align = Kernel::kRowAlign, per_block = (even + align - 1) / align * align;
  const int64_t acc_stride = Kernel::kPanels * 16;
  const bool keep = !steps.once && steps.chunks > 1;  // partial sums of the piece stay in scratch
  for (int64_t s = 0; s < steps.count(); ++s) {
    const auto step = steps.at(s);
    for (int64_t b = 0; b * per_block < rows; ++b) {
      const int64_t row = p.row_begin + b * per_block;
      const int block_rows = static_cast<int>(smaller(per_block, p.row_end - row));
      float* acc =
          scratch + (keep ? (step.group * row_blocks + b) * Kernel::kRows * acc_stride : 0);
      Prefetch prefetch = steps.prefetch(job, s, b, row_blocks);
      // The first group of a chunk brings its part of x near for all the others.
      if (step.group == 0 && !steps.once) {
        prefetch.x_rows = static_cast<int>(smaller(per_block, p.row_end - row - block_rows));
      }
      Kernel::block(job, row, block_rows, steps.weights(job, step), step.panels, step.k_begin,
                    step.k_end, acc, acc_stride, prefetch);
      if (step.k_end < job.k_blocks) continue;
      for (int r = 0; r < block_rows; ++r) {
        finish_row(job, row + r, step.panel, step.panels, acc + r * acc_stride);
      }
    }
  }
}

}  // namespace turbomind::TM_ISA_NS
