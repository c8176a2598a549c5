// The skinny product: 1 to 64 rows of x, weights streamed once at memory speed.
//
// A block of 8 warps goes over its share of the weight's rows in tiles of 64 (32 where no block has
// more); each warp computes its slot of K of the whole tile (linear_parts_cuda.h), and the slots
// are summed through shared memory. One block per multiprocessor, all of them resident at once,
// with shares that differ by 8 rows at most, so there is no last wave.
//
// Weights come by cp.async into a ring that each lane fills and reads for itself: nothing waits at
// a barrier but the epilogue, and what is in flight costs no registers. A stage holds 32 of K per
// warp: 4 KiB of weights for 64 rows, 32 KiB per block, and the block reads 512 contiguous bytes
// of each row. The epilogue of a tile runs while the next tile's stages are under way.
//
// How much is in flight on an H200, where 4.8 TB/s times 1 us of latency under load, over 132
// multiprocessors, are 36 KiB: with tiles of 64 rows 5 stages, 4 of them in flight, 128 KiB. Few
// weight rows a block leave a stage part empty, so there tiles are of 32 rows and the stages 8, 7
// in flight: 112 KiB for n = 4096 (4 groups of 8 rows a block), 56 KiB for n = 2048 (2 groups; with
// tiles of 64 rows it were 32 KiB, too little). With 17 to 32 rows of x 3 stages are in flight (96
// KiB), with 33 to 64 two (64 KiB). Shares for Llama-3-8B, in groups of 8 rows: qkv 768 / 132 = 5.8
// (6 at most: 97 % of the blocks' time used), o and down 512 / 132 = 3.9 (4: 97 %), gate_up 896
// quadruples / 132 = 6.8 (7: 97 %), head 16032 / 132 = 121.5 (122: 99.6 %).
//
// Between two products lie small kernels of a microsecond or two. Where a kernel may start while
// its predecessor runs, a block fills its ring with weights before it waits for x: up to 21 MiB on
// the whole device, all of a 1B model's qkv (12 MiB) or o (8 MiB), so the memory does not rest
// meanwhile. x of those stages then comes by way of registers: cp.async groups arrive in order, and
// one after the weights would hold up the first stage until the last.
//
// x comes from the second-level cache with each tile: rows / 64 of the weight's bytes, or twice
// that with tiles of 32. The worst of these is 16 rows by n = 4096: half as much again, 5.5 TB/s
// out of that cache at 85 % of the memory's 4.3. A stage of a block is 128 mma per 16 rows, 0.12
// us, while its weights take 1 us; a warp's stage is about 190 instructions.
//
// sm_90a: no spills, copies of 16 bytes past the first-level cache that fetch whole lines of the
// second (LDGSTS.E.BYPASS.LTC128B.128): a warp's copies take 64 bytes of a row, its neighbour's the
// next 64. All times here are computed; none was measured.
#include "linear/linear_parts_cuda.h"

namespace turbomind::TM_CUDA_NS {
namespace {

struct SkinnyParams {
  DeviceProduct p;
  int unit;
  int stages;
};

struct SkinnyGroupsParams {
  DeviceGroups g;
  int unit;
  int stages;
};

TM_DEVICE GroupRange block_groups(const DeviceProduct& p, int unit) {
  const int groups = (p.n + kGroup - 1) / kGroup, units = (groups + unit - 1) / unit;
  const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  const int begin = static_cast<int>(int64_t{units} * block / blocks) * unit;
  const int end = static_cast<int>(int64_t{units} * (block + 1) / blocks) * unit;
  return {begin, min(end, groups)};
}

// Tiles of 16 kRowTiles rows of x by kGroups groups of 8 weight rows.
template <int kRowTiles, int kGroups>
struct Shape {
  static constexpr int kXPieces = 2 * kRowTiles;
  static constexpr int kPieces = kGroups + kXPieces;
  static constexpr int kSumBytes = skinny_sum_bytes(kGroups);
  static constexpr int kStageBytes = skinny_stage_bytes(kRowTiles, kGroups);
  static constexpr int kMostAhead = most_skinny_stages(kRowTiles, kGroups) - 1;
};

// Position of a warp: a tile, and how many of its slot's chunks are done.
struct Cursor {
  int group, step;
  int tile_groups, steps;

  TM_DEVICE void advance() {
    if (++step < steps) return;
    step = 0;
    group += tile_groups;
  }
  TM_DEVICE int chunk() const { return warp_index() + step * kSlots; }
  TM_DEVICE bool outside(const DeviceProduct& p, int end_group) const {
    return group >= end_group || chunk() >= p.k_padded / kChunk;
  }
  // This lane's 16 bytes of a row.
  TM_DEVICE int64_t k_byte() const { return chunk() * (kChunk * 2) + lane_index() % 4 * 16; }
};

// Starts copying this lane's weights of one stage. What is not there becomes zero, unread: no
// branches, and addresses after the end are never followed.
template <int kGroups>
TM_DEVICE void fetch_weights(const DeviceProduct& p, const Cursor& at, int end_group,
                             uint8_t* stage) {
  if (at.outside(p, end_group)) return;
  const int r = lane_index() / 4, rows = min(end_group * kGroup, p.n) - at.group * kGroup - r;
  const int64_t step = int64_t{p.k_padded} * (2 * kGroup);
  const uint8_t* w =
      static_cast<const uint8_t*>(p.w) + at.group * step + r * (step / kGroup) + at.k_byte();
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    copy_constant16(stage + j * kPieceBytes, w + j * step, j * kGroup < rows);
  }
}

// This lane's bytes of rows r, r + 8, ... of x in one stage.
struct XRows {
  const uint8_t* first;
  int64_t step;
  int rows;

  TM_DEVICE XRows(const DeviceProduct& p, const Cursor& at)
      : step(p.x_stride * (2 * kGroup)), rows(p.m - lane_index() / 4) {
    const int r = lane_index() / 4;
    first = static_cast<const uint8_t*>(p.x) + r * (step / kGroup) + at.k_byte();
  }
  TM_DEVICE const uint8_t* at(int j) const { return first + j * step; }
  TM_DEVICE bool has(int j) const { return j * kGroup < rows; }
};

template <int kRowTiles, int kGroups>
TM_DEVICE void fetch(const DeviceProduct& p, const Cursor& at, int end_group, uint8_t* stage) {
  if (at.outside(p, end_group)) return;
  fetch_weights<kGroups>(p, at, end_group, stage);
  const XRows x(p, at);
#pragma unroll
  for (int j = 0; j < 2 * kRowTiles; ++j) {
    copy_async16(stage + (kGroups + j) * kPieceBytes, x.at(j), x.has(j));
  }
}

// x of the first `ahead` stages, whose weights are under way.
template <int kRowTiles, int kGroups>
TM_DEVICE void load_first_x(const DeviceProduct& p, Cursor at, int end_group, int ahead,
                            uint8_t* ring) {
  using S = Shape<kRowTiles, kGroups>;
  uint4 x[S::kMostAhead][S::kXPieces] = {};
#pragma unroll
  for (int s = 0; s < S::kMostAhead; ++s, at.advance()) {
    if (s >= ahead || at.outside(p, end_group)) continue;
    const XRows rows(p, at);
#pragma unroll
    for (int j = 0; j < S::kXPieces; ++j) {
      if (rows.has(j)) x[s][j] = load_streaming(reinterpret_cast<const uint4*>(rows.at(j)));
    }
  }
#pragma unroll
  for (int s = 0; s < S::kMostAhead; ++s) {
    if (s >= ahead) break;
#pragma unroll
    for (int j = 0; j < S::kXPieces; ++j) {
      *reinterpret_cast<uint4*>(ring + s * S::kStageBytes + (kGroups + j) * kPieceBytes) = x[s][j];
    }
  }
}

// Until the oldest stage under way is there.
TM_DEVICE void wait_for_oldest(int stages) {
  switch (stages) {
    case 2:
      return copy_async_wait<0>();
    case 3:
      return copy_async_wait<1>();
    case 4:
      return copy_async_wait<2>();
    case 5:
      return copy_async_wait<3>();
    case 6:
      return copy_async_wait<4>();
    case 7:
      return copy_async_wait<5>();
    default:
      return copy_async_wait<6>();
  }
}

TM_DEVICE uint4 piece(const uint8_t* stage, int index) {
  return *reinterpret_cast<const uint4*>(stage + index * kPieceBytes);
}

constexpr int kTogether = 4;  // groups that are multiplied without a branch

template <typename T, int kRowTiles, int kGroups, int kFirst>
TM_DEVICE void multiply_groups(float (&acc)[kRowTiles][kGroups][4], const uint4 (&x)[2 * kRowTiles],
                               const uint8_t* stage) {
  uint4 w[kTogether];
#pragma unroll
  for (int j = 0; j < kTogether; ++j) w[j] = piece(stage, kFirst + j);
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      multiply<T, 0>(acc[i][kFirst + j], x[2 * i], x[2 * i + 1], w[j]);
  }
#pragma unroll
  for (int j = 0; j < kTogether; ++j) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      multiply<T, 1>(acc[i][kFirst + j], x[2 * i], x[2 * i + 1], w[j]);
  }
}

template <typename T, int kRowTiles, int kGroups>
TM_DEVICE void multiply_stage(float (&acc)[kRowTiles][kGroups][4], const uint8_t* stage, int live) {
  uint4 x[2 * kRowTiles];
#pragma unroll
  for (int j = 0; j < 2 * kRowTiles; ++j) x[j] = piece(stage, kGroups + j);
  multiply_groups<T, kRowTiles, kGroups, 0>(acc, x, stage);
  if constexpr (kGroups > kTogether) {
    if (live > kTogether) multiply_groups<T, kRowTiles, kGroups, kTogether>(acc, x, stage);
  }
}

// Sums the slots in order and runs the epilogue. Slots pass through `sums` a few at a time.
template <typename T, int kRowTiles, int kGroups>
TM_DEVICE void finish_tile(const DeviceProduct& p, int group, int live, float* sums,
                           const float (&acc)[kRowTiles][kGroups][4]) {
  constexpr int kColumns = kGroups * kGroup, kStride = kColumns + kSumPadding;
  constexpr int kAtOnce = 4 / kRowTiles, kSlotFloats = kRowTiles * 16 * kStride;
  constexpr int kItems = kRowTiles * 16 * kColumns / 2 / kSkinnyThreads;
  const int tid = static_cast<int>(threadIdx.x);
  float first[kItems] = {}, second[kItems] = {};
  for (int slot = 0; slot < kSlots; slot += kAtOnce) {
    __syncthreads();  // the sums before these have been read
    if (warp_index() / kAtOnce * kAtOnce == slot) {
      float* mine = sums + warp_index() % kAtOnce * kSlotFloats;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
          keep_sums(mine, kStride, i * 16, j * kGroup, acc[i][j]);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const Pair at = pair_of(tid + i * kSkinnyThreads, kColumns);
      if (at.row >= p.m) continue;
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        const float* from = sums + s * kSlotFloats + at.row * kStride + at.col;
        first[i] += from[0];
        second[i] += from[16];
      }
    }
  }
  const int end = min((group + live) * kGroup, p.n);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const Pair at = pair_of(tid + i * kSkinnyThreads, kColumns);
    if (at.row < p.m) {
      finish_pair<T>(p, at.row, group * kGroup + at.col, end, first[i], second[i]);
    }
  }
}

template <typename T, int kRowTiles, int kGroups>
TM_DEVICE void skinny_product(const DeviceProduct& p, int unit, int stages) {
  using S = Shape<kRowTiles, kGroups>;
  const GroupRange range = block_groups(p, unit);
  const int chunks = p.k_padded / kChunk, steps = (chunks + kSlots - 1) / kSlots;
  float* sums = shared_memory<float>();
  // This lane's 16 bytes of the first piece of its warp, in the first stage.
  uint8_t* ring = shared_memory<uint8_t>() + S::kSumBytes +
                  warp_index() * (S::kPieces * kPieceBytes) + lane_index() * 16;
  const Cursor first{range.begin, 0, kGroups, steps};
  Cursor ahead = first;
  for (int s = 0; s < stages - 1; ++s, ahead.advance()) {
    fetch_weights<kGroups>(p, ahead, range.end, ring + s * S::kStageBytes);
    copy_async_commit();
  }
  wait_for_previous();
  load_first_x<kRowTiles, kGroups>(p, first, range.end, stages - 1, ring);
  int stage = 0, free_stage = stages - 1;
  for (int group = range.begin; group < range.end; group += kGroups) {
    const int live = min(range.end - group, kGroups);
    float acc[kRowTiles][kGroups][4] = {};
    for (int step = 0; step < steps; ++step, ahead.advance()) {
      wait_for_oldest(stages);
      // The stage that was read one step ago has been used since, so its place is free.
      fetch<kRowTiles, kGroups>(p, ahead, range.end, ring + free_stage * S::kStageBytes);
      copy_async_commit();
      if (warp_index() + step * kSlots < chunks) {
        multiply_stage<T, kRowTiles, kGroups>(acc, ring + stage * S::kStageBytes, live);
      }
      free_stage = stage;
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    finish_tile<T, kRowTiles, kGroups>(p, group, live, sums, acc);
  }
  if (blockIdx.x == gridDim.x - 1) zero_padding<T>(p, 0, p.m);
}

template <typename T, int kRowTiles, int kGroups>
TM_KERNEL(kSkinnyThreads, 1)
void skinny(const TM_GRID_CONSTANT SkinnyParams q) {
  let_next_start();
  skinny_product<T, kRowTiles, kGroups>(q.p, q.unit, q.stages);
}

// Blocks with y = i take the i-th weight that has rows.
template <typename T, int kRowTiles, int kGroups>
TM_KERNEL(kSkinnyThreads, 1)
void skinny_groups(const TM_GRID_CONSTANT SkinnyGroupsParams q) {
  let_next_start();
  wait_for_previous();
  const GroupTile at = group_tile(q.g, 16 * kRowTiles, static_cast<int>(blockIdx.y));
  if (at.p.m > 0) skinny_product<T, kRowTiles, kGroups>(at.p, q.unit, q.stages);
}

// ---- After cuBLASLt.

constexpr int kEach = 8;  // columns of one thread: 16 bytes
constexpr int kBehindThreads = 256;

struct GateParams {
  DeviceProduct p;
  const void* sums;
};

template <typename T>
TM_DEVICE void unpack8(const uint4& v, float (&out)[kEach]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack2<T>(words[i]);
    out[2 * i] = two.x;
    out[2 * i + 1] = two.y;
  }
}

// One block per row and 2048 columns of y.
template <typename T>
TM_KERNEL(kBehindThreads, 1)
void gate(const TM_GRID_CONSTANT GateParams q) {
  let_next_start();
  wait_for_previous();
  const DeviceProduct& p = q.p;
  const int row = static_cast<int>(blockIdx.x);
  const int y_col = (static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x)) * kEach;
  if (blockIdx.y == 0) zero_padding<T>(p, row, row + 1);
  if (y_col >= p.y_cols) return;
  const int col = y_col / 16 * 32 + y_col % 16;
  const T* sums = static_cast<const T*>(q.sums) + int64_t{row} * p.n + col;
  float gates[kEach], ups[kEach];
  unpack8<T>(load_streaming(reinterpret_cast<const uint4*>(sums)), gates);
  unpack8<T>(load_streaming(reinterpret_cast<const uint4*>(sums + 16)), ups);
  const int live = min(kEach, p.y_cols - y_col);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i >= live) break;
    gates[i] = gated(p.epilogue, with_terms(p, row, col + i, gates[i]),
                     with_terms(p, row, col + 16 + i, ups[i]));
  }
  const bool whole = live == kEach && p.y_stride % kEach == 0 && p.y_16bit &&
                     reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  if (whole) {
    store(reinterpret_cast<uint4*>(static_cast<T*>(p.y) + row * p.y_stride + y_col),
          make_uint4(pack2<T>(gates[0], gates[1]), pack2<T>(gates[2], gates[3]),
                     pack2<T>(gates[4], gates[5]), pack2<T>(gates[6], gates[7])));
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i < live) store_y<T>(p, row, y_col + i, gates[i]);
  }
}

// One block per row and 256 columns.
TM_KERNEL(kBehindThreads, 1) void add_terms(const TM_GRID_CONSTANT GateParams q) {
  let_next_start();
  wait_for_previous();
  const DeviceProduct& p = q.p;
  const int row = static_cast<int>(blockIdx.x);
  const int col = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  if (blockIdx.y == 0) zero_padding<Bf16>(p, row, row + 1);
  if (col >= p.n || (p.bias == nullptr && p.addend == nullptr)) return;
  const float sum = load(static_cast<const float*>(p.y) + row * p.y_stride + col);
  store_y<Bf16>(p, row, col, with_terms(p, row, col, sum));
}

// ---- Launches.

template <typename T, int kRowTiles, int kGroups>
void launch_tiles(StreamHandle stream, const DeviceProduct& p, const SkinnyPlan& plan) {
  launch<skinny<T, kRowTiles, kGroups>>(stream, dim3(static_cast<unsigned>(plan.blocks)),
                                        kSkinnyThreads, plan.shared_bytes,
                                        SkinnyParams{p, plan.unit, plan.stages});
}

template <typename T, int kRowTiles, int kGroups>
void launch_tiles(StreamHandle stream, const DeviceGroups& g, const SkinnyPlan& plan) {
  const dim3 grid(static_cast<unsigned>(plan.blocks),
                  static_cast<unsigned>(g.count < g.all.m ? g.count : g.all.m));
  launch<skinny_groups<T, kRowTiles, kGroups>>(stream, grid, kSkinnyThreads, plan.shared_bytes,
                                               SkinnyGroupsParams{g, plan.unit, plan.stages});
}

template <typename T, typename Product>
void launch_skinny(StreamHandle stream, const Product& p, const SkinnyPlan& plan) {
  if (plan.row_tiles == 1 && plan.tile_groups == kFewGroups)
    launch_tiles<T, 1, kFewGroups>(stream, p, plan);
  else if (plan.row_tiles == 1)
    launch_tiles<T, 1, kTileGroups>(stream, p, plan);
  else if (plan.row_tiles == 2)
    launch_tiles<T, 2, kTileGroups>(stream, p, plan);
  else
    launch_tiles<T, 4, kTileGroups>(stream, p, plan);
}

void run_skinny(StreamHandle stream, const DeviceProduct& p, const SkinnyPlan& plan) {
  if (p.dtype == DType::bf16)
    launch_skinny<Bf16>(stream, p, plan);
  else
    launch_skinny<F16>(stream, p, plan);
}

void run_skinny_groups(StreamHandle stream, const DeviceGroups& g, const SkinnyPlan& plan) {
  if (g.all.dtype == DType::bf16)
    launch_skinny<Bf16>(stream, g, plan);
  else
    launch_skinny<F16>(stream, g, plan);
}

unsigned blocks_of(int columns, int per_block) {
  return static_cast<unsigned>((columns + per_block - 1) / per_block);
}

void run_gate(StreamHandle stream, const DeviceProduct& p, const void* sums) {
  const dim3 grid(static_cast<unsigned>(p.m), blocks_of(p.y_cols, kBehindThreads * kEach));
  if (p.dtype == DType::bf16)
    launch<gate<Bf16>>(stream, grid, kBehindThreads, 0, GateParams{p, sums});
  else
    launch<gate<F16>>(stream, grid, kBehindThreads, 0, GateParams{p, sums});
}

void run_add_terms(StreamHandle stream, const DeviceProduct& p) {
  const dim3 grid(static_cast<unsigned>(p.m), blocks_of(p.n, kBehindThreads));
  launch<add_terms>(stream, grid, kBehindThreads, 0, GateParams{p, nullptr});
}

}  // namespace

const LinearCuda kLinearCuda{run_skinny, run_skinny_groups, run_gate, run_add_terms};

}  // namespace turbomind::TM_CUDA_NS
