// Formats of integer codes with scales (linear/code_layout.h), and of parts of several formats.
// Products round x to int8. Each format exists once and lives as long as the process.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "linear/code_layout.h"
#include "linear/linear_kernels.h"
#include "linear/weight_format.h"

namespace turbomind {

class CodeFormat final : public WeightFormat {
 public:
  explicit CodeFormat(const CodeLayout& layout);

  const char* name() const override { return name_.c_str(); }
  DType source_dtype() const override { return DType::f32; }
  DType activation_dtype(Isa) const override { return DType::f32; }
  bool packs_pieces() const override { return !layout_.ordered; }
  int64_t column_step() const override;
  size_t packed_bytes(int64_t n, int64_t k) const override;
  void check(const std::vector<RowSegment>& segments, int64_t k) const override;
  void pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t n, int64_t k,
            uint8_t* dst) const override;
  void pack_rows(ThreadPool& pool, const std::vector<RowSegment>& segments, const RowRange& rows,
                 int64_t n, int64_t k, uint8_t* dst) const override;
  void unpack_row(const LinearWeight& w, int64_t row, float* out) const override;
  void matmul(Context& ctx, const LinearWeight& w, const Mat& x, const Mat& y,
              const LinearArgs& args) const override;
  void matmul_group(Context& ctx, const WeightGroup& w, const int32_t* begin, int64_t most_rows,
                    const Mat& x, const Mat& y, Epilogue epilogue) const override;

 private:
  const int32_t* columns(const LinearWeight& w) const;
  LinearKernel kernel(Isa isa) const;
  LinearJob job(const LinearWeight& w) const;

  const CodeLayout layout_;
  const std::string name_;
};

// Returns the format of a layout, the same object for equal ones. Throws Error(invalid_request) for
// a layout that no kernel has.
const WeightFormat& code_format(const CodeLayout& layout);
// 8 bits, symmetric, one scale per output.
const WeightFormat& int8_format();

// Returns the format of a matrix whose rows are, from the first on, `rows` of each format. A
// product with it is one per part. It serves Epilogue::store only.
using FormatParts = std::vector<std::pair<int64_t, const WeightFormat*>>;
const WeightFormat& parts_format(const FormatParts& parts);

// Returns the format of such a name: "int8", "int4-g128-bfloat16-minimum", or parts as
// "896 int8 + 128 float16". Null for any other name.
const WeightFormat* named_code_format(const std::string& name);

}  // namespace turbomind
