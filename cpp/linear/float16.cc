// float16 weights, multiplied as float32 on every instruction set.
#include "linear/dense_format.h"

namespace turbomind {

namespace {

class Float16Format final : public DenseFormat {
 public:
  Float16Format() : DenseFormat("float16", DType::f16, 1) {}

 protected:
  const LinearKernel& kernel(Isa isa, int64_t) const override { return *dense_kernels(isa).f16; }
};

}  // namespace

const WeightFormat& float16_format() {
  static const Float16Format format;
  return format;
}

}  // namespace turbomind
