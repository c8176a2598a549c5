#include "linear/code_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/dtype.h"
#include "core/error.h"

namespace turbomind {

namespace {

int64_t groups_of(const CodeLayout& layout, int64_t cols) {
  return (cols + layout.group - 1) / layout.group;
}

void check_bytes(const char* name, const ByteSpan& span, int64_t bytes) {
  if (span.bytes != bytes)
    throw_error(ErrorCode::model, name, " has ", span.bytes, " bytes, expected ", bytes);
}

float element(const ByteSpan& span, ScaleType type, int64_t i) {
  if (type == ScaleType::f32) {
    float f;
    std::memcpy(&f, span.data + i * 4, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, span.data + i * 2, 2);
  return type == ScaleType::f16 ? f16_to_f32(h) : bf16_to_f32(h);
}

void check_finite(const char* name, const ByteSpan& span, ScaleType type) {
  if (type == ScaleType::factor) return;
  for (int64_t i = 0; i < span.bytes / scale_bytes(type); ++i) {
    if (!std::isfinite(element(span, type, i)))
      throw_error(ErrorCode::model, name, " has ", element(span, type, i),
                  ", expected finite numbers");
  }
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

void check_columns(const CodeRows& rows, const CodeLayout& layout) {
  check_bytes("columns", rows.columns, layout.ordered ? rows.cols * 4 : 0);
  std::vector<bool> seen(layout.ordered ? rows.cols : 0);
  for (size_t i = 0; i < seen.size(); ++i) {
    int32_t column;
    std::memcpy(&column, rows.columns.data + i * 4, 4);
    if (column < 0 || column >= rows.cols || seen[column])
      throw_error(ErrorCode::model, "columns has ", column, " at ", i, ", expected each of 0 to ",
                  rows.cols - 1, " once");
    seen[column] = true;
  }
}

}  // namespace

void check_code_rows(const CodeRows& rows, const CodeLayout& layout) {
  const bool factor = layout.scales == ScaleType::factor;
  if (factor && rows.cols % kSuperBlock != 0)
    throw_error(ErrorCode::model, "the codes have ", rows.cols,
                " columns, expected a multiple of 256");
  check_codes(rows, layout);
  const int64_t groups = rows.rows * groups_of(layout, rows.cols),
                size = scale_bytes(layout.scales);
  check_bytes("scales", rows.scales, layout.row_scales ? rows.rows * 4 : groups * size);
  check_finite("scales", rows.scales, layout.scales);
  const bool minimum = layout.offsets == Offsets::minimum;
  const int64_t offset = layout.offsets == Offsets::none ? 0 : minimum ? size : 1;
  check_bytes("offsets", rows.offsets, groups * offset);
  if (minimum) check_finite("offsets", rows.offsets, layout.scales);
  const int64_t super = factor ? rows.rows * (rows.cols / kSuperBlock) * 2 : 0;
  check_bytes("super_scales", rows.super_scales, super);
  check_finite("super_scales", rows.super_scales, ScaleType::f16);
  check_bytes("super_offsets", rows.super_offsets, minimum ? super : 0);
  check_finite("super_offsets", rows.super_offsets, ScaleType::f16);
  check_columns(rows, layout);
}

void read_codes(const CodeRows& rows, int64_t r, uint8_t* out) {
  if (rows.code_bits == 8) {
    std::memcpy(out, rows.codes.data + r * rows.cols, rows.cols);
    return;
  }
  const uint8_t* halves = rows.codes.data + r * ((rows.cols + 1) / 2);
  for (int64_t i = 0; i < rows.cols; ++i)
    out[i] = static_cast<uint8_t>(i % 2 ? halves[i / 2] >> 4 : halves[i / 2] & 15);
}

}  // namespace turbomind
