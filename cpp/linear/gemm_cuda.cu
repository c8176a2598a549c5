// The tiled product, for many rows: blocks of 128 rows by 128 or 64 columns, 8 warps.
//
// It adds in the order of the skinny kernel (linear_parts_cuda.h), slot after slot, so a row has
// the same bits in a prefill as in a decode step. That costs a second set of accumulators: 64
// registers for a warp's 64 by 32, and no time. A chunk of K is a stage: 8 + 8 KiB by cp.async,
// four stages, three in flight. Per chunk a warp loads 12 fragments of 16 bytes a lane for its 32
// mma: 384 cycles of shared memory per block, beside about 410 of the tensor cores (mma.sync
// reaches about 60 % of wgmma's rate on Hopper). sm_90a: 204 and 122 registers, no spills. All
// computed, nothing measured.
#include "linear/linear_parts_cuda.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kWarpColumns = 32;
constexpr int kColumnPieces = kWarpColumns / kGroup;
constexpr int kRasterRows = 16;  // row tiles whose blocks run side by side over the same weights

template <int kColumns>
struct Tile {
  static constexpr int kWarpsAcross = kColumns / kWarpColumns;
  static constexpr int kWarpsDown = kGemmThreads / 32 / kWarpsAcross;
  static constexpr int kWarpRows = kGemmRows / kWarpsDown;
  static constexpr int kRowTiles = kWarpRows / 16;
  static constexpr int kRowPieces = kGemmRows / 8;
  static constexpr int kPieces = kRowPieces + kColumns / kGroup;
  static constexpr int kStageBytes = kPieces * kPieceBytes;
  static constexpr int kSumBytes = kGemmRows * (kColumns + kSumPadding) * 4;
  static constexpr int kRingBytes = kGemmStages * kStageBytes;
  static constexpr int kSharedBytes = kRingBytes > kSumBytes ? kRingBytes : kSumBytes;
};

struct Corner {
  int row, col;
};

// Blocks that run together share rows of x and columns of w: 16 row tiles, then the next column.
TM_DEVICE Corner block_corner(const DeviceProduct& p, int columns) {
  const int down = (p.m + kGemmRows - 1) / kGemmRows, across = (p.n + columns - 1) / columns;
  const int block = static_cast<int>(blockIdx.x), band = block / (kRasterRows * across);
  const int first = band * kRasterRows, rows = min(kRasterRows, down - first);
  const int in_band = block - first * across;
  return {(first + in_band % rows) * kGemmRows, in_band / rows * columns};
}

// Chunks in the order of the additions: those of slot 0, then those of slot 1, ...
TM_DEVICE int next_chunk(int chunk, int chunks) {
  return chunk + kSlots < chunks ? chunk + kSlots : chunk % kSlots + 1;
}
TM_DEVICE bool ends_slot(int chunk, int chunks) {
  return chunk + kSlots >= chunks;
}

template <int kPieces>
TM_DEVICE void fetch_pieces(const void* matrix, int64_t row_bytes, int row, int rows, int chunk,
                            uint8_t* to) {
#pragma unroll
  for (int i = 0; i < kPieces * 32; i += kGemmThreads) {
    const int unit = i + static_cast<int>(threadIdx.x), r = row + unit / 4;
    const uint8_t* from =
        static_cast<const uint8_t*>(matrix) + r * row_bytes + chunk * (kChunk * 2) + unit % 4 * 16;
    copy_async16(to + unit * 16, from, r < rows);
  }
}

template <int kColumns>
TM_DEVICE void fetch_stage(const DeviceProduct& p, const Corner& at, int chunk, uint8_t* stage) {
  using Shape = Tile<kColumns>;
  fetch_pieces<Shape::kRowPieces>(p.x, p.x_stride * 2, at.row, p.m, chunk, stage);
  fetch_pieces<kColumns / kGroup>(p.w, int64_t{p.k_padded} * 2, at.col, p.n, chunk,
                                  stage + Shape::kRowPieces * kPieceBytes);
}

template <int kRowTiles>
using Sums = float[kRowTiles][kColumnPieces][4];

template <typename T, int kRowTiles, int kHalf>
TM_DEVICE void multiply_half(Sums<kRowTiles>& acc, const uint4 (&x)[2 * kRowTiles],
                             const uint4 (&w)[kColumnPieces]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
      multiply<T, kHalf>(acc[i][j], x[2 * i], x[2 * i + 1], w[j]);
    }
  }
}

// `x_stage` and `w_stage`: this lane's bytes of the warp's first pieces.
template <typename T, int kRowTiles>
TM_DEVICE void multiply_stage(Sums<kRowTiles>& acc, const uint8_t* x_stage,
                              const uint8_t* w_stage) {
  uint4 x[2 * kRowTiles], w[kColumnPieces];
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i)
    x[i] = *reinterpret_cast<const uint4*>(x_stage + i * kPieceBytes);
#pragma unroll
  for (int j = 0; j < kColumnPieces; ++j)
    w[j] = *reinterpret_cast<const uint4*>(w_stage + j * kPieceBytes);
  multiply_half<T, kRowTiles, 0>(acc, x, w);
  multiply_half<T, kRowTiles, 1>(acc, x, w);
}

template <int kRowTiles>
TM_DEVICE void add_slot(Sums<kRowTiles>& total, Sums<kRowTiles>& acc) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kColumnPieces; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        total[i][j][e] += acc[i][j][e];
        acc[i][j][e] = 0.0f;
      }
    }
  }
}

template <typename T, int kColumns>
TM_DEVICE void finish_tile(const DeviceProduct& p, const Corner& at, const float* sums) {
  constexpr int kStride = kColumns + kSumPadding;
  const int end = min(at.col + kColumns, p.n), rows = min(kGemmRows, p.m - at.row);
  for (int item = static_cast<int>(threadIdx.x); item < rows * kColumns / 2; item += kGemmThreads) {
    const Pair pair = pair_of(item, kColumns);
    const float* from = sums + pair.row * kStride + pair.col;
    finish_pair<T>(p, at.row + pair.row, at.col + pair.col, end, from[0], from[16]);
  }
  if (at.col + kColumns >= p.n) zero_padding<T>(p, at.row, at.row + rows);
}

template <typename T, int kColumns>
TM_DEVICE void multiply_tile(const DeviceProduct& p, const Corner& at) {
  using Shape = Tile<kColumns>;
  constexpr int kRowTiles = Shape::kRowTiles;
  const int chunks = p.k_padded / kChunk;
  const int down = warp_index() / Shape::kWarpsAcross, across = warp_index() % Shape::kWarpsAcross;
  uint8_t* ring = shared_memory<uint8_t>();
  const uint8_t* x_ring = ring + down * (2 * kRowTiles * kPieceBytes) + lane_index() * 16;
  const uint8_t* w_ring =
      ring + (Shape::kRowPieces + across * kColumnPieces) * kPieceBytes + lane_index() * 16;
  int ahead = 0, fetched = 0, chunk = 0, stage = 0, free_stage = kGemmStages - 1;
  for (; fetched < kGemmStages - 1; ++fetched, ahead = next_chunk(ahead, chunks)) {
    if (fetched < chunks) fetch_stage<kColumns>(p, at, ahead, ring + fetched * Shape::kStageBytes);
    copy_async_commit();
  }
  Sums<kRowTiles> total = {}, acc = {};
  for (int done = 0; done < chunks; ++done, chunk = next_chunk(chunk, chunks)) {
    copy_async_wait<kGemmStages - 2>();
    __syncthreads();  // everybody's copies of this stage are there, its predecessor is used up
    if (fetched < chunks) {
      fetch_stage<kColumns>(p, at, ahead, ring + free_stage * Shape::kStageBytes);
      ++fetched, ahead = next_chunk(ahead, chunks);
    }
    copy_async_commit();
    const int offset = stage * Shape::kStageBytes;
    multiply_stage<T, kRowTiles>(acc, x_ring + offset, w_ring + offset);
    if (ends_slot(chunk, chunks)) add_slot<kRowTiles>(total, acc);
    free_stage = stage;
    stage = stage + 1 == kGemmStages ? 0 : stage + 1;
  }
  __syncthreads();  // the ring becomes the sums
  float* sums = shared_memory<float>();
  for (int i = 0; i < kRowTiles; ++i) {
    for (int j = 0; j < kColumnPieces; ++j) {
      keep_sums(sums, kColumns + kSumPadding, down * Shape::kWarpRows + i * 16,
                across * kWarpColumns + j * kGroup, total[i][j]);
    }
  }
  __syncthreads();
  finish_tile<T, kColumns>(p, at, sums);
}

template <typename T, int kColumns>
TM_KERNEL(kGemmThreads, kColumns == 64 ? 2 : 1)
void gemm(const TM_GRID_CONSTANT DeviceProduct p) {
  let_next_start();
  wait_for_previous();
  multiply_tile<T, kColumns>(p, block_corner(p, kColumns));
}

// Blocks with y = i take the i-th tile of rows of all weights.
template <typename T, int kColumns>
TM_KERNEL(kGemmThreads, 2)
void gemm_groups(const TM_GRID_CONSTANT DeviceGroups g) {
  let_next_start();
  wait_for_previous();
  const GroupTile at = group_tile(g, kGemmRows, static_cast<int>(blockIdx.y));
  if (at.p.m == 0) return;
  multiply_tile<T, kColumns>(at.p, {at.tile * kGemmRows, static_cast<int>(blockIdx.x) * kColumns});
}

template <typename T, int kColumns>
void launch_gemm(StreamHandle stream, const DeviceProduct& p) {
  const int blocks = (p.m + kGemmRows - 1) / kGemmRows * ((p.n + kColumns - 1) / kColumns);
  launch<gemm<T, kColumns>>(stream, dim3(static_cast<unsigned>(blocks)), kGemmThreads,
                            Tile<kColumns>::kSharedBytes, p);
}

void run(StreamHandle stream, const DeviceProduct& p, int columns) {
  if (p.dtype == DType::bf16)
    columns == 64 ? launch_gemm<Bf16, 64>(stream, p) : launch_gemm<Bf16, 128>(stream, p);
  else
    columns == 64 ? launch_gemm<F16, 64>(stream, p) : launch_gemm<F16, 128>(stream, p);
}

template <typename T>
void launch_groups(StreamHandle stream, const DeviceGroups& g) {
  constexpr int kColumns = 64;  // an expert has few rows and a narrow output
  // Each weight's last tile may be part empty.
  const int tiles = g.all.m / kGemmRows + (g.count < g.all.m ? g.count : g.all.m);
  const dim3 grid(static_cast<unsigned>((g.all.n + kColumns - 1) / kColumns),
                  static_cast<unsigned>(tiles));
  launch<gemm_groups<T, kColumns>>(stream, grid, kGemmThreads, Tile<kColumns>::kSharedBytes, g);
}

void run_groups(StreamHandle stream, const DeviceGroups& g) {
  g.all.dtype == DType::bf16 ? launch_groups<Bf16>(stream, g) : launch_groups<F16>(stream, g);
}

}  // namespace

const GemmCuda kGemmCuda{run, run_groups};

}  // namespace turbomind::TM_CUDA_NS
