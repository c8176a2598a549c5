#include "ops/norm_kernels.h"

#include "cpu/typed_row.h"
#include "ops/norm_row.h"

namespace turbomind::TM_ISA_NS {

static void rms_row(const NormRow& row) {
  const VecF r = broadcast(row.weight ? inverse_rms(row.x, row.cols, row.eps) : 1.0f);
  const VecF offset = broadcast(row.weight_offset);
  for (int64_t c = 0; c < row.cols; c += kLanes) {
    const int n = row.cols - c < kLanes ? static_cast<int>(row.cols - c) : kLanes;
    VecF v = load_n(row.x + c, n);
    if (row.weight) v = (v * r) * (load_n(row.weight + c, n) + offset);
    store_typed_n(row.y, row.y_bf16, c, v, n);
  }
  zero_typed(row.y, row.y_bf16, row.cols, row.padded_cols);
}

const NormKernels& norm_kernels() {
  static constexpr NormKernels table{rms_row};
  return table;
}

}  // namespace turbomind::TM_ISA_NS
