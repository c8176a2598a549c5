// The interface between sampler.cc and row_cpu.cc, which is compiled once per instruction set:
// loops over one row of logits. Every set gives the same bits: steps of one element round alike,
// sums have a fixed shape, and a maximum has no rounding. Blocks of kRowBlock logits let selections
// skip most of a row.
#pragma once

#include <cstdint>

namespace turbomind::row {

constexpr int kRowBlock = 64;

constexpr int64_t blocks(int64_t n) {
  return (n + kRowBlock - 1) / kRowBlock;
}

struct Scan {
  float max = -__builtin_inff();
  bool nan = false;
};

struct RowKernels {
  // Returns the row's maximum and whether it has a NaN; writes each block's maximum to block_max
  // [blocks] unless that is null. Of a maximum that is zero the sign is not specified.
  Scan (*scan)(const float* x, int64_t n, float* block_max);
  // Writes weights[i] = exp((x[i] - max) * scale), zeros up to the end of the last block, and the
  // sum of each block to `sums` [blocks]; returns the sum of all.
  double (*weigh)(const float* x, int64_t n, float max, float scale, float* weights, double* sums);
  // Writes the sum of each block of weights, whole blocks, to `sums` [blocks].
  void (*sum_blocks)(const float* weights, int64_t blocks, double* sums);
  // Returns sum(exp(x - max)).
  double (*exp_sum)(const float* x, int64_t n, float max);
};

}  // namespace turbomind::row
