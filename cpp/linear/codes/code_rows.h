// Rows of codes that are in memory, in the arrangement closest to the packed one.
#pragma once

#include "linear/codes/code_source.h"

namespace turbomind {

// Row-major [rows, cols] codes. Types are those of the format that packs them.
class CodeRows : public CodeSource {
 public:
  int code_bits = 8;       // of `codes`: 8, or 4: two a byte, the even column in the low half
  ByteSpan codes;          // [rows, cols]
  ByteSpan scales;         // [rows, groups]; [rows] where a row has one
  ByteSpan offsets;        // [rows, groups] zeros or minima
  ByteSpan super_scales;   // [rows, cols / 256] float16, of ScaleType::factor
  ByteSpan super_offsets;  // the same, for minima

  void check(const CodeLayout& layout) const override;
  void decode(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
              CodePanel& panel) const override;
};

// Throws Error(model) unless `columns` has each of 0 to cols - 1 once where a layout is ordered,
// and nothing where it is not.
void check_columns(const ByteSpan& columns, int64_t cols, const CodeLayout& layout);

}  // namespace turbomind
