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
// For silu_mul, `col` is a gate's.
template <typename T>
TM_DEVICE void finish_pair(const DeviceProduct& p, int row, int col, int end, float first,
                           float second) {
  if (p.epilogue == Epilogue::silu_mul) {
    const int y_col = col / 32 * 16 + col % 32;
    if (col + 16 >= end || y_col >= p.y_cols) return;
    const float gate = with_terms(p, row, col, first);
    store_y<T>(p, row, y_col, silu(gate) * with_terms(p, row, col + 16, second));
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
