// Rows of codes that are in memory, in the arrangement closest to the packed one: any code, scale
// and offset of any layout, for tests.
#pragma once

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "linear/codes/code_panel.h"
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

  void check(const CodeLayout& layout) const override {
    const bool factor = layout.scales == ScaleType::factor;
    if (factor && cols % kSuperBlock != 0)
      throw_error(ErrorCode::model, "the codes have ", cols,
                  " columns, expected a multiple of 256");
    check_codes(layout);
    const int64_t groups = rows * ((cols + layout.group - 1) / layout.group),
                  size = scale_bytes(layout.scales);
    check_bytes("scales", scales, layout.row_scales ? rows * 4 : groups * size);
    const bool minimum = layout.offsets == Offsets::minimum;
    const int64_t offset = layout.offsets == Offsets::none ? 0 : minimum ? size : 1;
    check_bytes("offsets", offsets, groups * offset);
    const int64_t super = factor ? rows * (cols / kSuperBlock) * 2 : 0;
    check_bytes("super_scales", super_scales, super);
    check_bytes("super_offsets", super_offsets, minimum ? super : 0);
    check_columns(columns, cols, layout);
  }
  void decode(const CodePiece&, int64_t begin, int64_t count, int64_t at,
              CodePanel& panel) const override {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = begin + i, to = at + i;
      if (code_bits == 8)
        std::memcpy(panel.codes(to), codes.data + r * cols, cols);
      else
        read_halves(codes.data + r * ((cols + 1) / 2), cols, panel.codes(to));
      copy_row(scales, rows, r, panel.scales(to));
      copy_row(offsets, rows, r, panel.offsets(to));
      copy_row(super_scales, rows, r, panel.super_scales(to));
      copy_row(super_offsets, rows, r, panel.super_offsets(to));
    }
  }

 private:
  void check_codes(const CodeLayout& layout) const {
    if (code_bits != 8 && code_bits != 4)
      throw_error(ErrorCode::model, "code_bits is ", code_bits, ", expected 4 or 8");
    const int64_t row_bytes = code_bits == 8 ? cols : (cols + 1) / 2;
    check_bytes("codes", codes, rows * row_bytes);
    const int most = layout.bits == 4 ? 15 : layout.offsets == Offsets::minimum ? 127 : 255;
    if (code_bits == 4 || most == 255 || codes.bytes == 0) return;
    const int largest = *std::max_element(codes.data, codes.data + codes.bytes);
    if (largest > most)
      throw_error(ErrorCode::model, "codes has ", largest, ", expected at most ", most);
  }
  // Copies the items of rows, each of which has as many bytes as the next.
  static void copy_row(const ByteSpan& from, int64_t rows, int64_t r, uint8_t* to) {
    const int64_t bytes = from.bytes / rows;
    if (bytes > 0) std::memcpy(to, from.data + r * bytes, bytes);
  }
};

}  // namespace turbomind
