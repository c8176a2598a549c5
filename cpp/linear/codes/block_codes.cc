#include "linear/codes/block_codes.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "linear/codes/code_panel.h"

namespace turbomind {

namespace {

using Row = BlockType::Row;

void copy_half(uint8_t*& to, const uint8_t* from) {
  std::memcpy(to, from, 2);
  to += 2;
}

// Writes the low halves of `count` bytes, then the high ones.
void low_then_high(const uint8_t* nibbles, int64_t count, uint8_t* codes) {
  for (int64_t i = 0; i < count; ++i) codes[i] = nibbles[i] & 15;
  for (int64_t i = 0; i < count; ++i) codes[count + i] = nibbles[i] >> 4;
}

// Adds 16 to those of 32 codes whose bit is set in four bytes.
void add_fifth_bits(const uint8_t* bits, uint8_t* codes) {
  uint32_t all;
  std::memcpy(&all, bits, 4);
  for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] | ((all >> i & 1) << 4));
}

void q8_0(const uint8_t* block, int64_t blocks, const Row& to) {
  uint8_t *codes = to.codes, *scales = to.scales;
  for (int64_t b = 0; b < blocks; ++b, block += 34, codes += 32) {
    copy_half(scales, block);
    for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 0x80;
  }
}

void q4_0(const uint8_t* block, int64_t blocks, const Row& to) {
  uint8_t *codes = to.codes, *scales = to.scales;
  for (int64_t b = 0; b < blocks; ++b, block += 18, codes += 32) {
    copy_half(scales, block);
    low_then_high(block + 2, 16, codes);
  }
}

void q4_1(const uint8_t* block, int64_t blocks, const Row& to) {
  uint8_t *codes = to.codes, *scales = to.scales, *minima = to.offsets;
  for (int64_t b = 0; b < blocks; ++b, block += 20, codes += 32) {
    copy_half(scales, block);
    copy_half(minima, block + 2);
    low_then_high(block + 4, 16, codes);
  }
}

void q5_0(const uint8_t* block, int64_t blocks, const Row& to) {
  uint8_t *codes = to.codes, *scales = to.scales;
  for (int64_t b = 0; b < blocks; ++b, block += 22, codes += 32) {
    copy_half(scales, block);
    low_then_high(block + 6, 16, codes);
    add_fifth_bits(block + 2, codes);
    // Stored for a zero of 16, packed for one of 128.
    for (int i = 0; i < 32; ++i) codes[i] = static_cast<uint8_t>(codes[i] + 112);
  }
}

void q5_1(const uint8_t* block, int64_t blocks, const Row& to) {
  uint8_t *codes = to.codes, *scales = to.scales, *minima = to.offsets;
  for (int64_t b = 0; b < blocks; ++b, block += 24, codes += 32) {
    copy_half(scales, block);
    copy_half(minima, block + 2);
    low_then_high(block + 8, 16, codes);
    add_fifth_bits(block + 4, codes);
  }
}

// Reads eight scales and eight minima of 6 bits from 12 bytes.
void factors(const uint8_t* packed, uint8_t* scales, uint8_t* minima) {
  for (int i = 0; i < 4; ++i) {
    const uint8_t first = packed[i], second = packed[4 + i], last = packed[8 + i];
    scales[i] = first & 63;
    minima[i] = second & 63;
    scales[4 + i] = static_cast<uint8_t>((last & 15) | (first >> 6 << 4));
    minima[4 + i] = static_cast<uint8_t>((last >> 4) | (second >> 6 << 4));
  }
}

void q4_k(const uint8_t* block, int64_t blocks, const Row& to) {
  uint8_t *codes = to.codes, *scales = to.super_scales, *minima = to.super_offsets;
  for (int64_t b = 0; b < blocks; ++b, block += 144) {
    copy_half(scales, block);
    copy_half(minima, block + 2);
    factors(block + 4, to.scales + b * 8, to.offsets + b * 8);
    for (int run = 0; run < 4; ++run, codes += 64) low_then_high(block + 16 + run * 32, 32, codes);
  }
}

void q5_k(const uint8_t* block, int64_t blocks, const Row& to) {
  uint8_t *codes = to.codes, *scales = to.super_scales, *minima = to.super_offsets;
  for (int64_t b = 0; b < blocks; ++b, block += 176) {
    copy_half(scales, block);
    copy_half(minima, block + 2);
    factors(block + 4, to.scales + b * 8, to.offsets + b * 8);
    const uint8_t* high = block + 16;  // bit j of byte i: the fifth bit of column 32 * j + i
    for (int run = 0; run < 4; ++run, codes += 64) {
      low_then_high(block + 48 + run * 32, 32, codes);
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 32; ++i)
          codes[half * 32 + i] =
              static_cast<uint8_t>(codes[half * 32 + i] | ((high[i] >> (2 * run + half) & 1) << 4));
    }
  }
}

void q6_k(const uint8_t* block, int64_t blocks, const Row& to) {
  uint8_t *codes = to.codes, *scales = to.super_scales;
  for (int64_t b = 0; b < blocks; ++b, block += 210) {
    copy_half(scales, block + 208);
    std::memcpy(to.scales + b * 16, block + 192, 16);
    for (int half = 0; half < 2; ++half, codes += 128) {
      const uint8_t *low = block + half * 64, *high = block + 128 + half * 32;
      low_then_high(low, 64, codes);
      // Stored for a zero of 32, packed for one of 128.
      for (int run = 0; run < 4; ++run)
        for (int i = 0; i < 32; ++i)
          codes[run * 32 + i] =
              static_cast<uint8_t>((codes[run * 32 + i] | ((high[i] >> (2 * run) & 3) << 4)) + 96);
    }
  }
}

constexpr CodeLayout layout_of(int bits, int group, ScaleType scales,
                               Offsets offsets = Offsets::none) {
  CodeLayout layout;
  layout.bits = bits;
  layout.group = group;
  layout.scales = scales;
  layout.offsets = offsets;
  return layout;
}

bool equal(const CodeLayout& a, const CodeLayout& b) {
  return a.bits == b.bits && a.group == b.group && a.row_scales == b.row_scales &&
         a.scales == b.scales && a.offsets == b.offsets && a.ordered == b.ordered;
}

}  // namespace

const std::vector<BlockType>& block_types() {
  using S = ScaleType;
  constexpr Offsets kMinimum = Offsets::minimum;
  static const std::vector<BlockType> types = {
      {"Q8_0", 32, 34, layout_of(8, 32, S::f16), q8_0},
      {"Q4_0", 32, 18, layout_of(4, 32, S::f16), q4_0},
      {"Q4_1", 32, 20, layout_of(4, 32, S::f16, kMinimum), q4_1},
      {"Q5_0", 32, 22, layout_of(8, 32, S::f16), q5_0},
      {"Q5_1", 32, 24, layout_of(8, 32, S::f16, kMinimum), q5_1},
      {"Q4_K", 256, 144, layout_of(4, 32, S::factor, kMinimum), q4_k},
      {"Q5_K", 256, 176, layout_of(8, 32, S::factor, kMinimum), q5_k},
      {"Q6_K", 256, 210, layout_of(8, 16, S::factor), q6_k},
  };
  return types;
}

BlockCodes::BlockCodes(const std::string& tensor, const std::string& type, const SourceFile& file,
                       int64_t row_count, int64_t col_count) {
  const auto& all = block_types();
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const BlockType& t) { return type == t.name; });
  if (found == all.end())
    throw_error(ErrorCode::model, "tensor ", tensor, " has type ", type, ", expected ",
                all.front().name, " or another type of codes");
  type_ = &*found;
  rows = row_count;
  cols = col_count;
  const int64_t row = cols / type_->cols * type_->bytes;
  if (cols % type_->cols != 0 || file.bytes != rows * row)
    throw_error(ErrorCode::model, "tensor ", tensor, " has ", file.bytes, " bytes for ", rows,
                " rows of ", cols, " columns, expected whole blocks of ", type_->cols, ", ",
                rows * row, " bytes");
  tensors = {{tensor, file, 1, 1, row}};
}

void BlockCodes::check(const CodeLayout& layout) const {
  if (!equal(layout, type_->layout))
    throw_error(ErrorCode::model, "tensor ", tensors[0].name, " has type ", type_->name,
                ", expected the type of its format");
}

void BlockCodes::decode(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
                        CodePanel& panel) const {
  const int64_t bytes = tensors[0].unit_bytes;
  const uint8_t* row = piece.parts[0].data + (begin - piece.begin) * bytes;
  for (int64_t r = at; r < at + count; ++r, row += bytes)
    type_->decode(row, cols / type_->cols,
                  {panel.codes(r), panel.scales(r), panel.offsets(r), panel.super_scales(r),
                   panel.super_offsets(r)});
}

}  // namespace turbomind
