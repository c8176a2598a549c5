// Rows of codes of a quantized checkpoint, as its reader hands them over. Formats repack them and
// change no value.
#pragma once

#include <cstdint>
#include <string>

#include "linear/code_layout.h"

namespace turbomind {

struct ByteSpan {
  const uint8_t* data = nullptr;
  int64_t bytes = 0;
};

// Row-major [rows, cols] codes with scales of groups of columns; the last group of a row may be
// shorter. Types are those of the format that packs them.
struct CodeRows {
  int64_t rows = 0;
  int64_t cols = 0;
  int code_bits = 8;       // of `codes`: 8, or 4: two a byte, the even column in the low half
  ByteSpan codes;          // [rows, cols]
  ByteSpan scales;         // [rows, groups]; [rows] where a row has one
  ByteSpan offsets;        // [rows, groups] zeros or minima
  ByteSpan super_scales;   // [rows, cols / 256] float16, of ScaleType::factor
  ByteSpan super_offsets;  // the same, for minima
  ByteSpan columns;        // [cols] int32: the column of x that each column of codes multiplies
};

// Throws Error(model), without naming the weight, unless `rows` fit a layout: sizes, codes in
// range, finite scales and minima, columns that are a permutation.
void check_code_rows(const CodeRows& rows, const CodeLayout& layout);

// out[0..cols) = the codes of row r, a byte each.
void read_codes(const CodeRows& rows, int64_t r, uint8_t* out);

}  // namespace turbomind
