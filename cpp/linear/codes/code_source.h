// Rows of codes of a quantized checkpoint: where they are in files, and how they get into a panel.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "linear/code_layout.h"
#include "linear/weight_format.h"

namespace turbomind {

class CodePanel;

struct ByteSpan {
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
};

// Rows of a tensor in a file. The tensor has `strips` strips, one after the other; in each of them
// `unit_rows` rows, from the first on, take `unit_bytes`. A row-major tensor is one strip.
struct CodeTensor {
  std::string name;  // for messages
  SourceFile file;
  int64_t strips = 1;
  int64_t unit_rows = 1;
  int64_t unit_bytes = 0;

  int64_t units(int64_t rows) const { return (rows + unit_rows - 1) / unit_rows; }
};

// Rows [begin, end) of a source in memory: of each tensor the units that they are in, strip by
// strip.
struct CodePiece {
  // Rows that a piece may begin at: units of all tensors do.
  static constexpr int64_t kRows = 8;
  struct Part {
    const uint8_t* data = nullptr;
    int64_t strip_bytes = 0;
  };
  int64_t begin = 0, end = 0;
  std::vector<Part> parts;  // as CodeSource::tensors
};

// A matrix of codes with scales of groups of columns; the last group of a row may be shorter.
class CodeSource {
 public:
  virtual ~CodeSource() = default;

  int64_t rows = 0;
  int64_t cols = 0;
  ByteSpan columns;  // [cols] int32: the column of x that each column of codes multiplies, or none
  std::vector<CodeTensor> tensors;  // that decode() needs rows of; none: they are in memory

  // Throws Error(model), without naming the weight, unless the rows fit a layout as far as that is
  // known before they are read.
  virtual void check(const CodeLayout& layout) const = 0;
  // Writes rows [begin, begin + count) to the outputs from `at` on of a panel with all columns.
  // Throws Error(model) for values that are out of range.
  virtual void decode(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
                      CodePanel& panel) const = 0;

  // Bytes of a row in files, rounded up.
  int64_t row_bytes() const {
    int64_t bytes = 0;
    for (const CodeTensor& t : tensors)
      bytes += (t.strips * t.unit_bytes + t.unit_rows - 1) / t.unit_rows;
    return bytes;
  }
};

// Throws Error(model) naming the array unless it has so many bytes.
void check_bytes(const char* name, const ByteSpan& span, int64_t bytes);
// Throws Error(model) unless `columns` has each of 0 to cols - 1 once where a layout is ordered,
// and nothing where it is not.
void check_columns(const ByteSpan& columns, int64_t cols, const CodeLayout& layout);

}  // namespace turbomind
