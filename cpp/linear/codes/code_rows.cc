#include "linear/codes/code_rows.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "linear/codes/code_panel.h"

namespace turbomind {

namespace {

int64_t groups_of(const CodeLayout& layout, int64_t cols) {
  return (cols + layout.group - 1) / layout.group;
}

void check_bytes(const char* name, const ByteSpan& span, int64_t bytes) {
  if (span.bytes != bytes)
    throw_error(ErrorCode::model, name, " has ", span.bytes, " bytes, expected ", bytes);
}

void check_codes(const CodeRows& rows, const CodeLayout& layout) {
  if (rows.code_bits != 8 && rows.code_bits != 4)
    throw_error(ErrorCode::model, "code_bits is ", rows.code_bits, ", expected 4 or 8");
  const int64_t row_bytes = rows.code_bits == 8 ? rows.cols : (rows.cols + 1) / 2;
  check_bytes("codes", rows.codes, rows.rows * row_bytes);
  const int most = layout.bits == 4 ? 15 : layout.offsets == Offsets::minimum ? 127 : 255;
  if (rows.code_bits == 4 || most == 255 || rows.codes.bytes == 0) return;
  const int largest = *std::max_element(rows.codes.data, rows.codes.data + rows.codes.bytes);
  if (largest > most)
    throw_error(ErrorCode::model, "codes has ", largest, ", expected at most ", most);
}

// Copies the items of rows, each of which has as many bytes as the next.
void copy_row(const ByteSpan& from, int64_t rows, int64_t r, uint8_t* to) {
  const int64_t bytes = from.bytes / rows;
  if (bytes > 0) std::memcpy(to, from.data + r * bytes, bytes);
}

}  // namespace

void check_columns(const ByteSpan& columns, int64_t cols, const CodeLayout& layout) {
  check_bytes("columns", columns, layout.ordered ? cols * 4 : 0);
  std::vector<bool> seen(layout.ordered ? cols : 0);
  for (size_t i = 0; i < seen.size(); ++i) {
    int32_t column;
    std::memcpy(&column, columns.data + i * 4, 4);
    if (column < 0 || column >= cols || seen[column])
      throw_error(ErrorCode::model, "columns has ", column, " at ", i, ", expected each of 0 to ",
                  cols - 1, " once");
    seen[column] = true;
  }
}

void CodeRows::check(const CodeLayout& layout) const {
  const bool factor = layout.scales == ScaleType::factor;
  if (factor && cols % kSuperBlock != 0)
    throw_error(ErrorCode::model, "the codes have ", cols, " columns, expected a multiple of 256");
  check_codes(*this, layout);
  const int64_t groups = rows * groups_of(layout, cols), size = scale_bytes(layout.scales);
  check_bytes("scales", scales, layout.row_scales ? rows * 4 : groups * size);
  const bool minimum = layout.offsets == Offsets::minimum;
  const int64_t offset = layout.offsets == Offsets::none ? 0 : minimum ? size : 1;
  check_bytes("offsets", offsets, groups * offset);
  const int64_t super = factor ? rows * (cols / kSuperBlock) * 2 : 0;
  check_bytes("super_scales", super_scales, super);
  check_bytes("super_offsets", super_offsets, minimum ? super : 0);
  check_columns(columns, cols, layout);
}

void CodeRows::decode(const CodePiece&, int64_t begin, int64_t count, int64_t at,
                      CodePanel& panel) const {
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

}  // namespace turbomind
