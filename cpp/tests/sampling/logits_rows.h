// Rows of logits with a device's stride, for drivers of ops that read them.
#pragma once

#include <cstdint>
#include <limits>

#include "tests/cuda/driver_gpu.h"

namespace turbomind {

// Rows whose stride is larger than the vocabulary, with NaN in between.
struct LogitsRows {
  int vocab;
  int64_t stride;
  SharedVector<float> data;

  LogitsRows(int rows, int vocab)
      : vocab(vocab),
        stride((vocab + 3) / 4 * 4 + 4),
        data(rows * stride, std::numeric_limits<float>::quiet_NaN()) {}
  float* row(int r) { return data.data() + r * stride; }
  int count() const { return static_cast<int>(data.size() / stride); }
};

}  // namespace turbomind
