#include "ops/norm_kernels.h"

#include "ops/norm_row.h"

namespace turbomind::TM_ISA_NS {

static void rms_row(const NormRow& row) {
  const VecF r = broadcast(inverse_rms(row.x, row.cols, row.eps));
  const VecF offset = broadcast(row.weight_offset);
  float* yf = static_cast<float*>(row.y);
  uint16_t* yh = static_cast<uint16_t*>(row.y);
  for (int64_t c = 0; c < row.cols; c += kLanes) {
    const int n = row.cols - c < kLanes ? static_cast<int>(row.cols - c) : kLanes;
    const VecF v = (load_n(row.x + c, n) * r) * (load_n(row.weight + c, n) + offset);
    if (row.y_bf16) {
      store_bf16_n(yh + c, v, n);
    } else {
      store_n(yf + c, v, n);
    }
  }
  for (int64_t c = row.cols; c < row.padded_cols; ++c) {
    if (row.y_bf16) {
      yh[c] = 0;
    } else {
      yf[c] = 0;
    }
  }
}

const NormKernels& norm_kernels() {
  static constexpr NormKernels table{rms_row};
  return table;
}

}  // namespace turbomind::TM_ISA_NS
