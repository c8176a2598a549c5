// y = epilogue(x W^T + bias + addend) on a GPU.
//
// Three ways to the same product: the skinny kernel (few rows: it streams the weight at memory
// speed), the tiled kernel gemm (many rows) and cuBLASLt. The first two give a row the same bits,
// whatever the rows beside it and whichever of the two computes it; see linear_parts_cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/gpu.h"
#include "cuda/types.h"
#include "linear/epilogue.h"

namespace turbomind {

class CublasLt;

// Pointers are device memory; w and x are aligned to 16 bytes.
struct DeviceProduct {
  const void* w = nullptr;        // [n][k_padded], zeros after k
  const void* x = nullptr;        // [m][x_stride], of w's type; zeros after k up to k_padded
  void* y = nullptr;              // [m][y_stride], float32 or w's type
  const float* bias = nullptr;    // [n] in w's row order, or null
  const float* addend = nullptr;  // [m][addend_stride] in w's row order, or null
  int64_t x_stride = 0;           // elements, a multiple of 8
  int64_t y_stride = 0;
  int64_t addend_stride = 0;
  int32_t m = 0;
  int32_t n = 0;           // rows of w; a multiple of 32 where gated
  int32_t k_padded = 0;    // a multiple of 32
  int32_t y_cols = 0;      // n; where gated at most n / 2 and more than n / 2 - 16
  int32_t y_zero_end = 0;  // columns [y_cols, y_zero_end) of y become zero
  DType dtype = DType::bf16;
  bool y_16bit = false;
  Epilogue epilogue = Epilogue::store;
};

// A product of each weight of a group with its own rows of x. `all` is that of the first weight,
// its x and y those of all rows.
struct DeviceGroups {
  DeviceProduct all;
  const int32_t* begin = nullptr;  // [count + 1] in device memory: first row of each weight
  int32_t count = 0;               // of weights
  int32_t most_rows = 0;           // of a weight
  int64_t w_stride = 0;            // bytes between weights, a multiple of 16
  int64_t bias_stride = 0;         // elements
};

enum class LinearPath { skinny, gemm, cublaslt };

// Up to this many rows the skinny kernel is as fast as reading the weight is.
constexpr int kSkinnyRows = 16;
// Up to this many it can take: tiles of 16, 32 or 64 rows.
constexpr int kMaxSkinnyRows = 64;

// `cublaslt`: it is there and takes this product. `deterministic`: only kernels that give a row the
// same bits whatever the other rows. `skinny_rows`: what the skinny kernel can take on this GPU.
LinearPath linear_path(int64_t m, bool deterministic, bool cublaslt, int skinny_rows);

// How the skinny kernel is launched. Neither field changes a result.
struct SkinnyPlan {
  int row_tiles = 0;    // of 16 rows: 1, 2 or 4; 0: these rows do not fit the GPU's shared memory
  int tile_groups = 0;  // of 8 weight rows: 8, or 4 where no block has more
  int blocks = 0;
  int unit = 0;    // groups of 8 weight rows that a block takes together: 4 where gated, else 1
  int stages = 0;  // of the pipeline, at least 2
  size_t shared_bytes = 0;
};
SkinnyPlan skinny_plan(const DeviceProduct& p, int multiprocessors, size_t shared_per_block);
// The most rows for which skinny_plan has one.
int skinny_rows(size_t shared_per_block);

// Columns of a tile of the tiled kernel, which has 128 rows: 128, or 64 where that would leave
// multiprocessors idle.
int gemm_columns(const DeviceProduct& p, int multiprocessors);

// Bytes that the kernels load and store, as the emulator counts them.
struct LinearTraffic {
  int64_t loaded = 0;
  int64_t stored = 0;
};
LinearTraffic skinny_traffic(const DeviceProduct& p, const SkinnyPlan& plan);
LinearTraffic gemm_traffic(const DeviceProduct& p, int columns);
// Returns the bytes that any way of computing it moves: each operand once.
int64_t linear_bytes(const DeviceProduct& p);

// Settings that all products of a model share.
struct DeviceLinear {
  GpuKind kind = GpuKind::emulated;
  int multiprocessors = 1;
  size_t shared_per_block = 0;
  bool deterministic = false;
  CublasLt* cublaslt = nullptr;  // null: our kernels only
  // Device memory for the gates and ups of cuBLASLt's products, aligned to 256 bytes. With less
  // than gate_scratch_bytes(m, n) a product goes in pieces of rows; with less than
  // gate_scratch_bytes(1, n) it takes our kernels.
  void* scratch = nullptr;
  size_t scratch_bytes = 0;
};
constexpr size_t gate_scratch_bytes(int64_t m, int64_t n) {
  return static_cast<size_t>(m) * static_cast<size_t>(n) * 2;
}

// Checks `p` (Error(internal) names what is wrong), chooses the path and launches. m == 0 is
// allowed and does nothing.
void linear(const DeviceLinear& linear, StreamHandle stream, const DeviceProduct& p);
// The same for a group, by our kernels alone, so that a row has the bits that they give it
// anywhere. The host reads nothing of `begin`.
void linear_groups(const DeviceLinear& linear, StreamHandle stream, const DeviceGroups& g);

// ---- The kernels' tables.

struct LinearCuda {
  void (*skinny)(StreamHandle stream, const DeviceProduct& p, const SkinnyPlan& plan);
  void (*skinny_groups)(StreamHandle stream, const DeviceGroups& g, const SkinnyPlan& plan);
  // The epilogue of a cuBLASLt product. y = act(gate) * up of `sums`, [m][n] in w's type.
  void (*gate)(StreamHandle stream, const DeviceProduct& p, const void* sums);
  // y += bias + addend, y being float32 where there is one; zeros after y_cols.
  void (*add_terms)(StreamHandle stream, const DeviceProduct& p);
};
struct GemmCuda {
  void (*run)(StreamHandle stream, const DeviceProduct& p, int columns);
  void (*run_groups)(StreamHandle stream, const DeviceGroups& g);
};

namespace cuda_emulated {
extern const LinearCuda kLinearCuda;
extern const GemmCuda kGemmCuda;
}  // namespace cuda_emulated
namespace cuda {  // where nvcc was there
extern const LinearCuda kLinearCuda;
extern const GemmCuda kGemmCuda;
}  // namespace cuda

// ---- The kernels' tiles, which the plans and the traffic depend on.

constexpr int kChunk = 32;        // k of one pipeline stage and slot
constexpr int kGroup = 8;         // weight rows of one piece
constexpr int kSlots = 8;         // shares of K: slot s takes chunks s, s + 8, s + 16, ...
constexpr int kTileGroups = 8;    // groups of a skinny tile
constexpr int kFewGroups = 4;     // groups of one for few weight rows a block
constexpr int kPieceBytes = 512;  // 8 rows by 32 k
constexpr int kGemmRows = 128;
constexpr int kSkinnyThreads = kSlots * 32;
constexpr int kGemmThreads = 256;
constexpr int kGemmStages = 4;
// Floats after each row of sums in shared memory, so that a warp's rows lie in different banks.
constexpr int kSumPadding = 8;
// Sums of 4 / row_tiles slots of a skinny tile: 18 or 10 KiB whatever the rows.
constexpr int skinny_sum_bytes(int tile_groups) {
  return 4 * 16 * (tile_groups * kGroup + kSumPadding) * 4;
}
constexpr int skinny_stage_bytes(int row_tiles, int tile_groups) {
  return kSlots * (tile_groups + 2 * row_tiles) * kPieceBytes;
}
// Stages: as many as fit Hopper's 227 KiB; for few groups fewer, which leaves room for other
// kernels.
constexpr int most_skinny_stages(int row_tiles, int tile_groups) {
  if (tile_groups == kFewGroups) return 8;
  return row_tiles == 1 ? 5 : row_tiles == 2 ? 4 : 3;
}

// Groups [begin, end) of `groups` that block `block` of `blocks` takes.
struct GroupRange {
  int begin, end;
};

}  // namespace turbomind
