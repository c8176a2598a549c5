// One row of codes on its way into a packed panel, and out of it.
#pragma once

#include <cstdint>
#include <vector>

#include "linear/code_layout.h"
#include "linear/code_rows.h"

namespace turbomind {

// Codes, and the scales and offsets of the groups in the layout's types; padded to whole K blocks.
struct CodedRow {
  CodedRow(const CodeLayout& layout, int64_t k);

  // Takes the k columns from `first_col` on of row r of a checkpoint's codes; groups of scales
  // begin there.
  void take(const CodeRows& rows, int64_t r, int64_t first_col = 0);
  // A row of zeros.
  void clear();
  // Quantizes `k` values. 8 bits: symmetric, the largest magnitude of the row is 127. 4 bits: each
  // group's smallest and largest value are 0 and 15, with a bfloat16 scale and minimum. Ties round
  // to even.
  void quantize(const float* values);

  // Writes to output r of a panel, whose bytes for it are zero.
  void write(uint8_t* panel, int64_t r) const;
  // Returns the values of output r of a panel: out[0..k).
  static void read(const CodeLayout& layout, int64_t k, const uint8_t* panel, int64_t r,
                   float* out);

 private:
  void quantize_group(const float* values, int64_t begin, int64_t end);

  const CodeLayout& layout_;
  const int64_t k_;
  std::vector<uint8_t> codes_;                         // [k padded]
  std::vector<uint8_t> scales_, offsets_;              // [groups padded]
  std::vector<uint8_t> super_scales_, super_offsets_;  // [k blocks] float16
};

// Whether dense rows can be quantized to a layout.
bool can_quantize(const CodeLayout& layout);

}  // namespace turbomind
