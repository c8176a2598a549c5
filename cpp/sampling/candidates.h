// Selections from one row of logits by its blocks' maxima (row_kernels.h). For sampler.cc only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "sampling/row_kernels.h"

namespace turbomind::row {

// Returns the lowest id whose logit is `max`, a value of the row.
inline int32_t find_max(const float* x, int64_t n, float max, const float* block_max) {
  int64_t b = 0;
  while (block_max[b] != max) ++b;
  const float* begin = x + b * kRowBlock;
  const float* end = x + std::min(n, (b + 1) * kRowBlock);
  return static_cast<int32_t>(std::find(begin, end, max) - x);
}

struct Candidate {
  float logit = 0;
  int32_t id = 0;
  double weight = 0;
};

// Orders tokens, everywhere in sampling: higher logit first, ties by lower id.
inline bool before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// Writes the k first tokens of that order to `out`, themselves in no particular order. The k-th
// largest block maximum is a lower bound of the k-th largest logit, so few more than k tokens are
// read.
inline void select_top(const float* x, int64_t n, int64_t k, const float* block_max,
                       std::vector<float>& scratch, std::vector<Candidate>& out) {
  out.clear();
  const int64_t nb = blocks(n);
  float floor = -std::numeric_limits<float>::infinity();
  if (k <= nb) {
    scratch.assign(block_max, block_max + nb);
    std::nth_element(scratch.begin(), scratch.begin() + (k - 1), scratch.end(), std::greater<>());
    floor = scratch[k - 1];
  }
  for (int64_t b = 0; b < nb; ++b) {
    if (block_max[b] < floor) continue;
    const int64_t end = std::min(n, (b + 1) * kRowBlock);
    for (int64_t i = b * kRowBlock; i < end; ++i) {
      if (x[i] >= floor) out.push_back({x[i], static_cast<int32_t>(i), 0});
    }
  }
  if (static_cast<int64_t>(out.size()) > k) {
    std::nth_element(out.begin(), out.begin() + k, out.end(), before);
    out.resize(k);
  }
}

}  // namespace turbomind::row
