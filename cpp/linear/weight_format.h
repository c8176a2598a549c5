// A weight format: how a [n, k] matrix is stored packed, and how a product with it is computed.
// Callers of `linear` never see which one they got. One file per format; the registry is
// linear/weight_format.cc, and docs/contributing/add-a-weight-format.md describes how to add one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/context.h"
#include "core/dtype.h"
#include "core/tensor.h"
#include "linear/epilogue.h"

namespace turbomind {

class CodeSource;  // linear/codes/code_source.h
struct CodePiece;

// A row-major source matrix in an open file. The caller owns the descriptor.
struct SourceFile {
  std::string path;  // for messages
  int descriptor = -1;
  int64_t offset = 0;  // bytes before the first element
  int64_t bytes = 0;
};

// Rows [row_begin, row_begin + rows) and columns [col_begin, col_begin + cols) of a row-major
// source matrix. `data` points at the source's first element; null where the rows are read or made
// first, and for rows of zeros, which have nothing at all.
struct RowSegment {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t row_begin = 0;
  int64_t rows = 0;
  int64_t cols = 0;
  const SourceFile* file = nullptr;
  const CodeSource* codes = nullptr;  // in place of data and file: rows of a quantized checkpoint
  int64_t col_begin = 0;
  int64_t source_cols = 0;  // of the whole source; 0: cols
  // In place of data: writes elements [begin, end) of the source to memory for them.
  const std::function<void(int64_t begin, int64_t end, void* out)>* make = nullptr;
  const CodePiece* piece = nullptr;  // of `codes`: these rows in memory, if they come from files

  int64_t all_cols() const { return source_cols ? source_cols : cols; }
};

struct LinearArgs {
  const float* bias = nullptr;  // [n], in the weight's packed row order
  const Mat* addend =
      nullptr;  // [m, n] float32, packed row order; added before the epilogue (LoRA)
  Epilogue epilogue = Epilogue::store;
  // The weight is some rows of a matrix: y, bias and addend are those of the whole, and the product
  // writes the columns from `first_col` on; padding only where it has the last one.
  bool part = false;
  int64_t first_col = 0;
};

struct LinearWeight;
struct WeightGroup;

struct RowRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

// Rows that a matrix may be packed by, one piece after the other.
constexpr int64_t kPackRows = 256;

class WeightFormat {
 public:
  virtual ~WeightFormat() = default;
  virtual const char* name() const = 0;
  virtual DType source_dtype() const = 0;  // element type that values are rounded to when packed
  // Returns the element type of activations that matmul takes without converting them.
  virtual DType activation_dtype(Isa isa) const = 0;
  // Bytes of the packed form of an [n, k] matrix; padding included. For a multiple of
  // kPackRows rows it is also where the row after them begins.
  virtual size_t packed_bytes(int64_t n, int64_t k) const = 0;
  // Whether the packed form of some whole pieces of kPackRows rows is a matrix of its own.
  virtual bool packs_pieces() const { return true; }
  // The ranges of rows, in order, of which pieces of kPackRows rows may be packed one by one.
  virtual std::vector<RowRange> ranges(int64_t n) const { return {{0, n}}; }
  // Where a matrix may be cut into parts that are packed for themselves. The format of some rows,
  // whose ranges [begin, end) are in order:
  virtual const WeightFormat& of_rows(const std::vector<RowRange>&) const { return *this; }
  // Columns may be cut at multiples of this; 0: nowhere.
  virtual int64_t column_step() const { return 1; }
  // Throws Error(model), without the weight's name, for sources that pack() cannot take.
  virtual void check(const std::vector<RowSegment>& segments, int64_t k) const;
  // Packs segments that are in memory, stacked by rows, into `dst`; n = sum of rows. Runs on the
  // pool.
  virtual void pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t n, int64_t k,
                    uint8_t* dst) const = 0;
  // Packs a piece of the rows of a matrix [n, k], whose packed form begins at `dst`: whole pieces
  // of kPackRows rows of one of ranges(), or all rows to its end.
  virtual void pack_rows(ThreadPool& pool, const std::vector<RowSegment>& segments,
                         const RowRange& rows, int64_t n, int64_t k, uint8_t* dst) const;
  // The inverse of pack for one row: k floats. Serves embedding lookups and tests.
  virtual void unpack_row(const LinearWeight& w, int64_t row, float* out) const = 0;
  // Allocates the work memory of products of up to `rows` rows with `w`. Formats that need none do
  // nothing.
  virtual void reserve(Context&, const LinearWeight&, int64_t /*rows*/) const {}
  // y = epilogue(x W^T). x.dtype is float32 or bfloat16; y is float32 or bfloat16 (its padded
  // columns are set to zero). Row r of y depends on row r of x alone, for any m, any pool size.
  virtual void matmul(Context& ctx, const LinearWeight& w, const Mat& x, const Mat& y,
                      const LinearArgs& args) const = 0;
  // matmul of rows [begin[i], begin[i + 1]) of x and y with weight i of the group, for each i;
  // `begin` is memory of the context's device, and no weight has more than `most_rows` rows. By
  // default one product after the other, for formats on the host.
  virtual void matmul_group(Context& ctx, const WeightGroup& w, const int32_t* begin,
                            int64_t most_rows, const Mat& x, const Mat& y, Epilogue epilogue) const;
};

// Row stride in elements for bfloat16 activations that feed `linear`: at least padded_cols, and an
// odd multiple of 4 or 8 cache lines. Lines of one column, and of the columns beside it, of the 32
// rows of a tile block then spread evenly over the 64 sets of a first-level cache. At a multiple
// of 4 KiB the tile kernels would have to copy x. Any stride >= padded_cols works.
constexpr int64_t activation_stride(int64_t cols) {
  const int64_t lines = round_up(padded_cols(cols) / kKBlock, 4);
  return (lines % 16 == 0 ? lines + 4 : lines) * kKBlock;
}

struct LinearWeight {
  const WeightFormat* format = nullptr;
  int64_t n = 0;            // output features
  int64_t k = 0;            // input features
  uint8_t* data = nullptr;  // packed, 64-byte aligned, owned by the model's arena
  size_t bytes = 0;
};

// Weights of one shape and format, each with a bias [n] or all without. In a GPU's memory weights
// lie at equal distances, and so do biases.
struct WeightGroup {
  std::vector<LinearWeight> weights;
  std::vector<const float*> biases;

  const float* bias(size_t i) const { return biases.empty() ? nullptr : biases[i]; }
};

// The memory of the packed data, and the processor that computes the product.
enum class WeightPlace : uint8_t { host, gpu };

// Returns the format `name` for a place: "bfloat16", "float16" or, on the host only, "float32" and
// those of linear/code_format.h. Throws Error(invalid_request) naming those that the place has.
const WeightFormat& weight_format(const std::string& name, WeightPlace place = WeightPlace::host);
// Returns the names of a place, such as "bfloat16 or float16".
std::string weight_format_names(WeightPlace place);
bool has_weight_format(const std::string& name, WeightPlace place);

}  // namespace turbomind
