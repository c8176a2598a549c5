// float32 weights, multiplied as float32 on every instruction set.
#include "linear/dense_format.h"

namespace turbomind {

namespace {

class Float32Format final : public DenseFormat {
 public:
  Float32Format() : DenseFormat("float32", DType::f32, 1) {}

 protected:
  const LinearKernel& kernel(Isa isa, int64_t) const override { return *dense_kernels(isa).f32; }
};

}  // namespace

const WeightFormat& float32_format() {
  static const Float32Format format;
  return format;
}

}  // namespace turbomind
