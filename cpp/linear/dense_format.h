// The base of formats without scales (bfloat16, float16, float32): packing, and the product's split
// into pieces.
#pragma once

#include "linear/linear_kernels.h"
#include "linear/weight_format.h"

namespace turbomind {

// Packed: [n/16][k/pair][16][pair] elements, n padded to 16 and k to 32 with zeros.
class DenseFormat : public WeightFormat {
 public:
  // `pair`: consecutive k of one output that lie side by side.
  DenseFormat(const char* name, DType dtype, int pair) : name_(name), dtype_(dtype), pair_(pair) {}

  const char* name() const override { return name_; }
  DType source_dtype() const override { return dtype_; }
  DType activation_dtype(Isa isa) const override {
    return dtype_ == DType::bf16 && isa_has_bf16_dot(isa) ? DType::bf16 : DType::f32;
  }
  size_t packed_bytes(int64_t n, int64_t k) const override;
  void pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t n, int64_t k,
            uint8_t* dst) const override;
  void unpack_row(const LinearWeight& w, int64_t row, float* out) const override;
  void matmul(Context& ctx, const LinearWeight& w, const Mat& x, const Mat& y,
              const LinearArgs& args) const override;
  void matmul_group(Context& ctx, const WeightGroup& w, const int32_t* begin, int64_t most_rows,
                    const Mat& x, const Mat& y, Epilogue epilogue) const override;

 protected:
  virtual const LinearKernel& kernel(Isa isa, int64_t m) const = 0;

 private:
  LinearJob job(int64_t k) const;

  const char* name_;
  DType dtype_;
  int pair_;
};

const WeightFormat& bfloat16_format();
const WeightFormat& float16_format();
const WeightFormat& float32_format();

}  // namespace turbomind
