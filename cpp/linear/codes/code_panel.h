// Rows of codes on their way into a packed panel, and one row out of it.
#pragma once

#include <cstdint>
#include <vector>

#include "linear/code_layout.h"

namespace turbomind {

// The kPanel rows of a panel, each with its codes, a byte each, and the scales and offsets of the
// groups in the layout's types. Columns after the last are padding, which rows do not write.
class CodePanel {
 public:
  CodePanel(const CodeLayout& layout, int64_t cols);

  int64_t cols() const { return cols_; }
  const CodeLayout& layout() const { return layout_; }
  // The memory of row r.
  uint8_t* codes(int64_t r) { return codes_.data() + r * code_stride_; }
  uint8_t* scales(int64_t r) { return scales_.data() + r * scale_stride_; }
  uint8_t* offsets(int64_t r) { return offsets_.data() + r * scale_stride_; }
  uint8_t* super_scales(int64_t r) { return super_scales_.data() + r * super_stride_; }
  uint8_t* super_offsets(int64_t r) { return super_offsets_.data() + r * super_stride_; }
  // Room for the codes of a row, of which decoders make another order.
  uint8_t* scratch() { return codes(kPanel); }

  // Makes row r one of zeros.
  void clear(int64_t r);
  // Quantizes the values of row r. 8 bits: symmetric, the largest magnitude of the row is 127.
  // 4 bits: each group's smallest and largest value are 0 and 15, with a bfloat16 scale and
  // minimum. Ties round to even.
  void quantize(int64_t r, const float* values);
  // Takes the columns from `first_col` on of all rows of a panel of more columns; groups of scales
  // begin there.
  void take(const CodePanel& whole, int64_t first_col);

  // Throws Error(model) for a scale or minimum that is not finite.
  void check_finite() const;
  // Writes all bytes of a packed panel.
  void write(uint8_t* panel) const;
  // Returns the values of output r of a packed panel: out[0..k).
  static void read(const CodeLayout& layout, int64_t k, const uint8_t* panel, int64_t r,
                   float* out);

 private:
  void quantize_group(int64_t r, const float* values, int64_t begin, int64_t end);
  int64_t group_bytes() const { return layout_.row_scales ? 4 : scale_bytes(layout_.scales); }

  const CodeLayout layout_;
  const int64_t cols_;
  // Bytes of a row; those of codes are no power of two, so that 16 rows share no set of a cache.
  const int64_t code_stride_, scale_stride_, super_stride_;
  std::vector<uint8_t> codes_, scales_, offsets_;      // [rows][k padded], [rows][groups padded]
  std::vector<uint8_t> super_scales_, super_offsets_;  // [rows][k blocks] float16
};

// out[0..count) = codes of four bits, two a byte, the even one in the low half.
void read_halves(const uint8_t* halves, int64_t count, uint8_t* out);

// Whether dense rows can be quantized to a layout.
bool can_quantize(const CodeLayout& layout);

}  // namespace turbomind
