// bfloat16 weights: a line of 64 bytes is 16 outputs times two consecutive k, so 16 lines are one B
// tile of AMX and one line is one operand of AVX512-BF16.
#include "linear/dense_format.h"

namespace turbomind {

namespace {

class Bfloat16Format final : public DenseFormat {
 public:
  Bfloat16Format() : DenseFormat("bfloat16", DType::bf16, 2) {}

 protected:
  const LinearKernel& kernel(Isa isa, int64_t m) const override {
    const DenseKernels& kernels = dense_kernels(isa);
    if (m == 7 || m == 8) return *kernels.bf16_eight;
    return m <= 16 ? *kernels.bf16_small : *kernels.bf16;
  }
};

}  // namespace

const WeightFormat& bfloat16_format() {
  static const Bfloat16Format format;
  return format;
}

}  // namespace turbomind
