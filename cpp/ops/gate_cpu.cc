#include "cpu/typed_row.h"
#include "ops/gate_kernels.h"

namespace turbomind::TM_ISA_NS {

static void multiply_row(const GateRow& row) {
  for (int64_t c = 0; c < row.cols; c += kLanes) {
    const int n = row.cols - c < kLanes ? static_cast<int>(row.cols - c) : kLanes;
    const VecF gate = load_n(row.gate + c, n);
    const VecF active = row.epilogue == Epilogue::gelu_mul ? gelu_tanh(gate) : silu(gate);
    store_typed_n(row.y, row.y_bf16, c, active * load_n(row.up + c, n), n);
  }
  zero_typed(row.y, row.y_bf16, row.cols, row.padded_cols);
}

const GateKernels& gate_kernels() {
  static constexpr GateKernels table{multiply_row};
  return table;
}

}  // namespace turbomind::TM_ISA_NS
