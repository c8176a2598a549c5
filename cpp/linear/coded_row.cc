#include "linear/coded_row.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/dtype.h"

namespace turbomind {

namespace {

constexpr int64_t kLine = kPanel * 4;  // bytes: four consecutive k of 16 outputs

uint16_t read_u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

float read_scale(ScaleType type, const uint8_t* p) {
  float f;
  switch (type) {
    case ScaleType::f32:
      std::memcpy(&f, p, 4);
      return f;
    case ScaleType::f16:
      return f16_to_f32(read_u16(p));
    case ScaleType::bf16:
      return bf16_to_f32(read_u16(p));
    case ScaleType::factor:
      return static_cast<int8_t>(*p);
  }
  return 0;
}

// Copies `count` items of `bytes` bytes: from is [count], to is [count][kPanel], at output r.
void spread(const uint8_t* from, int64_t count, int64_t bytes, int64_t r, uint8_t* to) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(to + (i * kPanel + r) * bytes, from + i * bytes, bytes);
}

// The value of a code in one group.
struct GroupValue {
  Offsets offsets;
  float scale, offset;

  // `block`: a K block of the panel.
  GroupValue(const CodeLayout& l, const uint8_t* block, const uint8_t* row_scales, int64_t group,
             int64_t r)
      : offsets(l.offsets), scale(0), offset(l.bits == 8 ? 128.0f : 8.0f) {
    if (l.row_scales) {
      scale = read_scale(ScaleType::f32, row_scales + r * 4);
      return;
    }
    const int64_t bytes = scale_bytes(l.scales), at = group * kPanel + r;
    const uint8_t* super = block + l.super_at() + r * 2;
    const bool factor = l.scales == ScaleType::factor;
    scale = read_scale(l.scales, block + l.scales_at() + at * bytes);
    if (factor) scale = f16_to_f32(read_u16(super)) * scale;
    if (offsets == Offsets::zero) offset = block[l.offsets_at() + at];
    if (offsets != Offsets::minimum) return;
    offset = read_scale(l.scales, block + l.offsets_at() + at * bytes);
    if (factor) offset = -(f16_to_f32(read_u16(super + kPanel * 2)) * offset);
  }
  float of(int code) const {
    const float c = static_cast<float>(code);
    return offsets == Offsets::minimum ? scale * c + offset : scale * (c - offset);
  }
};

int code_at(const CodeLayout& l, const uint8_t* block, int64_t k, int64_t r) {
  const int64_t line = k / 4, at = r * 4 + k % 4;
  if (l.bits == 8) return block[line * kLine + at];
  const uint8_t halves = block[line / 2 * kLine + at];
  return line % 2 ? halves >> 4 : halves & 15;
}

}  // namespace

CodedRow::CodedRow(const CodeLayout& layout, int64_t k)
    : layout_(layout),
      k_(k),
      codes_(layout.k_blocks(k) * layout.k_block()),
      scales_(layout.k_blocks(k) * layout.groups() * scale_bytes(layout.scales)),
      offsets_(scales_.size()),
      super_scales_(layout.k_blocks(k) * 2),
      super_offsets_(super_scales_.size()) {}

void CodedRow::clear() {
  for (auto* bytes : {&scales_, &offsets_, &super_scales_, &super_offsets_})
    std::fill(bytes->begin(), bytes->end(), 0);
  std::fill(codes_.begin(), codes_.end(), static_cast<uint8_t>(layout_.bias()));
}

void CodedRow::take(const CodeRows& rows, int64_t r, int64_t first_col) {
  clear();
  if (k_ == rows.cols) {
    read_codes(rows, r, codes_.data());
  } else {
    std::vector<uint8_t> whole(rows.cols);
    read_codes(rows, r, whole.data());
    std::memcpy(codes_.data(), whole.data() + first_col, k_);
  }
  // One item of `from` is for `step` columns; 0: for the row.
  const auto copy = [&](const ByteSpan& from, int64_t step, std::vector<uint8_t>& to) {
    const auto items = [&](int64_t columns) { return step ? (columns + step - 1) / step : 1; };
    const int64_t bytes = from.bytes / std::max<int64_t>(1, rows.rows);
    const int64_t item = bytes / items(rows.cols), first = step ? first_col / step : 0;
    if (bytes > 0) std::memcpy(to.data(), from.data + r * bytes + first * item, items(k_) * item);
  };
  const int64_t group = layout_.row_scales ? 0 : layout_.group;
  copy(rows.scales, group, scales_);
  copy(rows.offsets, group, offsets_);
  copy(rows.super_scales, kSuperBlock, super_scales_);
  copy(rows.super_offsets, kSuperBlock, super_offsets_);
}

void CodedRow::quantize(const float* values) {
  clear();
  if (layout_.bits == 4) {
    for (int64_t begin = 0; begin < k_; begin += layout_.group)
      quantize_group(values, begin, std::min(k_, begin + layout_.group));
    return;
  }
  float largest = 0;
  for (int64_t i = 0; i < k_; ++i) largest = std::max(largest, std::fabs(values[i]));
  const float scale = largest / 127.0f;
  std::memcpy(scales_.data(), &scale, 4);
  if (scale == 0) return;
  for (int64_t i = 0; i < k_; ++i)
    codes_[i] =
        static_cast<uint8_t>(128 + std::lrint(std::clamp(values[i] / scale, -127.0f, 127.0f)));
}

void CodedRow::quantize_group(const float* values, int64_t begin, int64_t end) {
  const auto [low, high] = std::minmax_element(values + begin, values + end);
  const uint16_t minimum = f32_to_bf16(*low), scale = f32_to_bf16((*high - *low) / 15.0f);
  std::memcpy(offsets_.data() + begin / layout_.group * 2, &minimum, 2);
  std::memcpy(scales_.data() + begin / layout_.group * 2, &scale, 2);
  const float m = bf16_to_f32(minimum), s = bf16_to_f32(scale);
  for (int64_t i = begin; i < end; ++i) {
    const float code = s == 0 ? 0.0f : (values[i] - m) / s;
    codes_[i] = static_cast<uint8_t>(std::lrint(std::clamp(code, 0.0f, 15.0f)));
  }
}

void CodedRow::write(uint8_t* panel, int64_t r) const {
  const CodeLayout& l = layout_;
  const int64_t groups = l.groups(), bytes = scale_bytes(l.scales);
  for (int64_t b = 0; b < l.k_blocks(k_); ++b) {
    uint8_t* block = panel + b * l.block_bytes();
    const uint8_t* codes = codes_.data() + b * l.k_block();
    for (int64_t line = 0; line < l.k_block() / 4; ++line) {
      uint8_t* at = block + (l.bits == 4 ? line / 2 : line) * kLine + r * 4;
      for (int64_t i = 0; i < 4; ++i)
        at[i] =
            static_cast<uint8_t>(at[i] | codes[line * 4 + i] << (l.bits == 4 && line % 2 ? 4 : 0));
    }
    if (l.row_scales) continue;
    spread(scales_.data() + b * groups * bytes, groups, bytes, r, block + l.scales_at());
    if (l.offsets != Offsets::none) {
      const int64_t size = l.offsets == Offsets::zero ? 1 : bytes;
      spread(offsets_.data() + b * groups * size, groups, size, r, block + l.offsets_at());
    }
    if (l.scales != ScaleType::factor) continue;
    spread(super_scales_.data() + b * 2, 1, 2, r, block + l.super_at());
    if (l.offsets == Offsets::minimum)
      spread(super_offsets_.data() + b * 2, 1, 2, r, block + l.super_at() + kPanel * 2);
  }
  if (l.row_scales) spread(scales_.data(), 1, 4, r, panel + l.panel_bytes(k_) - kPanel * 4);
}

void CodedRow::read(const CodeLayout& l, int64_t k, const uint8_t* panel, int64_t r, float* out) {
  const uint8_t* row_scales = panel + l.panel_bytes(k) - kPanel * 4;
  for (int64_t begin = 0; begin < k; begin += l.group) {
    const int64_t in_block = begin % l.k_block();
    const uint8_t* block = panel + begin / l.k_block() * l.block_bytes();
    const GroupValue value(l, block, row_scales, in_block / l.group, r);
    const int64_t count = std::min<int64_t>(l.group, k - begin);
    for (int64_t i = 0; i < count; ++i)
      out[begin + i] = value.of(code_at(l, block, in_block + i, r));
  }
}

bool can_quantize(const CodeLayout& l) {
  if (l.ordered) return false;
  return l.bits == 8 ? l.row_scales : l.scales == ScaleType::bf16 && l.offsets == Offsets::minimum;
}

}  // namespace turbomind
