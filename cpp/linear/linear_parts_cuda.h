// Code that the skinny and the tiled kernel share, and the reason that they give a row the same
// bits.
//
// K is cut into chunks of 32, and chunk c belongs to slot c % 8. A slot's sum runs over its chunks
// in ascending order, two mma16816 each, from zero; a product is the sum of the slots, in order,
// from zero. Rows are the mma's A operand, whose rows do not touch each other. The skinny kernel
// gives each slot a warp, the tiled one goes through them one after another: the same additions.
//
// Both keep operands in shared memory as pieces of 8 rows by 32 k. Lane 4 r + t owns the 16 bytes
// at k 8 t of row r: it copies them there, and they are what it needs as a fragment, since the
// mma's own numbering of k may be permuted as long as A and B agree. Number 2 t + i of the mma
// stands for k 8 t + i, number 2 t + 8 + i for k 8 t + 2 + i; the second mma of a chunk takes
// k 8 t + 4 to 8 t + 7. So no ldmatrix, no swizzle, and no bank conflicts.
#pragma once

#include "cuda/kernel.h"
#include "linear/linear_cuda.h"

namespace turbomind::TM_CUDA_NS {

// Half of a chunk: c += x w^T over k 8 t + 4 kHalf and the 3 after it. `low` and `high` are of
// rows r and r + 8.
template <typename T, int kHalf>
TM_DEVICE void multiply(float (&c)[4], const uint4& low, const uint4& high, const uint4& w) {
  if constexpr (kHalf == 0) {
    const uint32_t a[4] = {low.x, high.x, low.y, high.y}, b[2] = {w.x, w.y};
    mma16816<T>(c, a, b);
  } else {
    const uint32_t a[4] = {low.z, high.z, low.w, high.w}, b[2] = {w.z, w.w};
    mma16816<T>(c, a, b);
  }
}

// The accumulators of 16 rows by 8 columns, at `row` and `col` of `sums`.
TM_DEVICE void keep_sums(float* sums, int stride, int row, int col, const float (&c)[4]) {
  const int lane = lane_index();
  float* at = sums + (row + lane / 4) * stride + col + lane % 4 * 2;
  *reinterpret_cast<float2*>(at) = make_float2(c[0], c[1]);
  *reinterpret_cast<float2*>(at + 8 * stride) = make_float2(c[2], c[3]);
}

TM_DEVICE float with_terms(const DeviceProduct& p, int row, int col, float sum) {
  if (p.bias != nullptr) sum += load(p.bias + col);
  if (p.addend != nullptr) sum += load(p.addend + row * p.addend_stride + col);
  return sum;
}

TM_DEVICE float silu(float v) {
  return v / (1.0f + fast_exp(-v));
}

// As gelu_tanh of cpu/vec.h.
TM_DEVICE float gelu_tanh(float v) {
  return v / (1.0f + fast_exp(-v * fma(v * v, 0.044715f * 1.5957691216f, 1.5957691216f)));
}

// A NaN stays one.
TM_DEVICE float clamped_swiglu(float gate, float up) {
  const float g = gate > kSwigluLimit ? kSwigluLimit : gate;
  const float u = up > kSwigluLimit ? kSwigluLimit : up < -kSwigluLimit ? -kSwigluLimit : up;
  return g / (1.0f + fast_exp(g * -kSwigluAlpha)) * (u + 1.0f);
}

TM_DEVICE float gated(Epilogue epilogue, float gate, float up) {
  if (epilogue == Epilogue::swiglu_mul) return clamped_swiglu(gate, up);
  return (epilogue == Epilogue::gelu_mul ? gelu_tanh(gate) : silu(gate)) * up;
}

template <typename T>
TM_DEVICE void store_y(const DeviceProduct& p, int row, int col, float v) {
  const int64_t at = row * p.y_stride + col;
  if (p.y_16bit) {
    store(static_cast<T*>(p.y) + at, from_float<T>(v));
  } else {
    store(static_cast<float*>(p.y) + at, v);
  }
}

template <typename T>
TM_DEVICE void finish_column(const DeviceProduct& p, int row, int col, float sum) {
  sum = with_terms(p, row, col, sum);
  if (p.epilogue == Epilogue::add) {
    sum = load(static_cast<const float*>(p.y) + row * p.y_stride + col) + sum;
  }
  store_y<T>(p, row, col, sum);
}

// The epilogue of two sums of a row: packed columns `col` and `col` + 16, as far as below `end`.
// Where it is gated, `col` is a gate's.
template <typename T>
TM_DEVICE void finish_pair(const DeviceProduct& p, int row, int col, int end, float first,
                           float second) {
  if (p.epilogue != Epilogue::store && p.epilogue != Epilogue::add) {
    const int y_col = col / 32 * 16 + col % 32;
    if (col + 16 >= end || y_col >= p.y_cols) return;
    const float gate = with_terms(p, row, col, first);
    store_y<T>(p, row, y_col, gated(p.epilogue, gate, with_terms(p, row, col + 16, second)));
  } else {
    if (col < end) finish_column<T>(p, row, col, first);
    if (col + 16 < end) finish_column<T>(p, row, col + 16, second);
  }
}

// Pair number `item` of a tile with `columns` columns: 16 neighbours of a row, then the next 16.
struct Pair {
  int row, col;
};
TM_DEVICE Pair pair_of(int item, int columns) {
  const int per_row = columns / 2, i = item % per_row;
  return {item / per_row, i / 16 * 32 + i % 16};
}

// The product of the weight that takes a tile, and the tile's number among those of the weight.
struct GroupTile {
  DeviceProduct p;  // m is 0 after the last tile
  int tile;
};

// Tiles of `tile_rows` rows are numbered weight after weight; one without rows has none. All lanes
// of a warp take part: each looks at every 32nd weight.
TM_DEVICE GroupTile group_tile(const DeviceGroups& g, int tile_rows, int tile) {
  const int lane = lane_index();
  for (int first = 0; first < g.count; first += kWarp) {
    const int weight = first + lane;
    const int begin = weight < g.count ? load(g.begin + weight) : 0;
    const int rows = weight < g.count ? load(g.begin + weight + 1) - begin : 0;
    const int tiles = (rows + tile_rows - 1) / tile_rows;
    int end = tiles;  // of the tiles of this lane's weight and those before it
    for (int step = 1; step < kWarp; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, end, step);
      if (lane >= step) end += before;
    }
    const unsigned owner = __ballot_sync(kAllLanes, tile < end && tile >= end - tiles);
    if (owner == 0) {
      tile -= __shfl_sync(kAllLanes, end, kWarp - 1);
      continue;
    }
    int source = 0;
    while ((owner >> source & 1) == 0) ++source;
    GroupTile found{g.all, tile - __shfl_sync(kAllLanes, end - tiles, source)};
    const int row = __shfl_sync(kAllLanes, begin, source);
    DeviceProduct& p = found.p;
    p.m = __shfl_sync(kAllLanes, rows, source);
    p.w = static_cast<const uint8_t*>(p.w) + (first + source) * g.w_stride;
    p.x = static_cast<const uint8_t*>(p.x) + row * p.x_stride * 2;
    p.y = static_cast<uint8_t*>(p.y) + row * p.y_stride * (p.y_16bit ? 2 : 4);
    if (p.bias != nullptr) p.bias += (first + source) * g.bias_stride;
    return found;
  }
  GroupTile none{g.all, 0};
  none.p.m = 0;
  return none;
}

template <typename T>
TM_DEVICE void zero_padding(const DeviceProduct& p, int row_begin, int row_end) {
  const int width = p.y_zero_end - p.y_cols;
  if (width <= 0) return;
  const int begin = row_begin * width, end = row_end * width;
  for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
    store_y<T>(p, i / width, p.y_cols + i % width, 0.0f);
  }
}

}  // namespace turbomind::TM_CUDA_NS
