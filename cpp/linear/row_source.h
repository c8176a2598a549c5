// Rows of source tensors on their way into a packed weight.
#pragma once

#include <vector>

#include "linear/weight_format.h"

namespace turbomind {

// dst[0..count) = the `count` elements of `src` from `begin`, rounded from one type to the other;
// the rest up to kKBlock is zero. Sources need no alignment; null: zeros.
void convert_block(const uint8_t* src, DType from, int64_t begin, int64_t count, DType to,
                   void* dst);

// Rows [begin, begin + count) of the matrix that segments stack up to.
std::vector<RowSegment> some_rows(const std::vector<RowSegment>& segments, int64_t begin,
                                  int64_t count);
// Columns [begin, begin + count) of it.
std::vector<RowSegment> some_columns(std::vector<RowSegment> segments, int64_t begin,
                                     int64_t count);

// The matrix [n, k] that segments stack up to. Throws Error(internal) when they do not.
class SourceRows {
 public:
  SourceRows(const std::vector<RowSegment>& segments, int64_t n, int64_t k);
  const uint8_t* row(int64_t r) const { return rows_[r].data; }
  DType dtype(int64_t r) const { return rows_[r].dtype; }
  // Row r in type `to`, padded with zeros to whole blocks of K.
  void convert(int64_t r, DType to, uint8_t* dst) const;

 private:
  struct Row {
    const uint8_t* data;
    DType dtype;
  };
  std::vector<Row> rows_;
  int64_t k_;
};

}  // namespace turbomind
