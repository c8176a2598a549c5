// Logits as a device has them, for the drivers of what reads them.
#pragma once

#include <cstdint>
#include <limits>

#include "tests/cuda/driver_gpu.h"

namespace turbomind {

// Rows whose stride leaves NaN behind the vocabulary.
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
