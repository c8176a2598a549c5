// The kernels with which the ranks of a group on GPUs exchange what they computed: sums of parts,
// fused with the norm that follows (ops/norm.h), and columns of the logits.
//
// Each kernel is an exchange. It tells the other ranks that what its predecessors in the stream
// have stored is there, waits until all of them have told the same, and then reads their memory.
// The parts of two successive exchanges lie in different memory: who has come to exchange n + 1
// has read those of n.
#pragma once

#include <cstdint>

#include "cuda/types.h"
#include "ops/norm_kernels.h"

namespace turbomind {

constexpr int kMostGpuRanks = 16;

// The place of an exchange in a step, the same of all ranks but for `own`, `missing` and `base`.
struct DeviceExchange {
  int32_t ranks = 0;
  int32_t own = 0;
  // A word of each rank, in memory that all ranks read; the own one is raised. Not used where
  // `waits` is false: the ranks' kernels then follow each other in one stream.
  uint32_t* counters[kMostGpuRanks] = {};
  bool waits = true;
  const uint32_t* base = nullptr;  // device memory: where the counts of this step begin
  uint32_t number = 0;          // of the exchange in its step, from 1: the count is *base + number
  uint32_t* stop = nullptr;     // pinned memory: other than 0 ends all waits
  uint32_t* missing = nullptr;  // pinned memory: becomes 1 + the first rank that did not come in
                                // time, and *stop then 1, so that no later wait of any rank lasts
  uint64_t limit_ns = 0;        // of a wait
  // Where ranks share a GPU, the blocks that may wait at once: a larger kernel follows one block
  // that waits for it. 0: any number.
  int32_t most_waiting = 0;
};

// x = scale * (the sum of `parts` in their order), or x += it where `add`, float32; then the norm's
// y = rms_norm(x) where norm.y is not null (norm.x and norm.x_stride are not used).
struct DeviceRankSum {
  DeviceExchange exchange;
  const float* parts[kMostGpuRanks] = {};  // of each rank [rows][part_stride]
  int64_t part_stride = 0;                 // elements
  float* x = nullptr;                      // [rows][x_stride]
  int64_t x_stride = 0;
  int32_t rows = 0;
  int32_t cols = 0;
  float scale = 1;
  bool add = false;
  DeviceNorm norm;
};

// y[row, begin[r] ...] = rank r's part, float32. Ranks without a y just tell and wait.
struct DeviceRankColumns {
  DeviceExchange exchange;
  const float* parts[kMostGpuRanks] = {};  // of each rank [rows][part_strides[r]]
  int64_t part_strides[kMostGpuRanks] = {};
  int32_t begin[kMostGpuRanks + 1] = {};  // first column of each rank, and the end
  float* y = nullptr;
  int64_t y_stride = 0;
  int32_t rows = 0;
};

struct RankSumCuda {
  void (*sum)(StreamHandle stream, const DeviceRankSum& sum);
  void (*columns)(StreamHandle stream, const DeviceRankColumns& columns);
  void (*meet)(StreamHandle stream, const DeviceExchange& exchange);  // tells and waits, one block
};

namespace cuda_emulated {
extern const RankSumCuda kRankSumCuda;
}
namespace cuda {  // where nvcc was there
extern const RankSumCuda kRankSumCuda;
}

}  // namespace turbomind
