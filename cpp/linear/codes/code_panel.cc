#include "linear/codes/code_panel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/dtype.h"
#include "core/error.h"

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

// Copies items [first, first + count) of each row: to is [count][kPanel].
template <typename T>
void spread(const uint8_t* rows, int64_t stride, int64_t first, int64_t count, uint8_t* to) {
  for (int64_t r = 0; r < kPanel; ++r) {
    const uint8_t* from = rows + r * stride + first * sizeof(T);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(to + (i * kPanel + r) * sizeof(T), from + i * sizeof(T), sizeof(T));
  }
}

void spread(const std::vector<uint8_t>& rows, int64_t stride, int64_t first, int64_t count,
            int64_t bytes, uint8_t* to) {
  const auto copy = bytes == 1 ? spread<uint8_t> : bytes == 2 ? spread<uint16_t> : spread<uint32_t>;
  copy(rows.data(), stride, first, count, to);
}

uint32_t four_codes(const uint8_t* codes) {
  uint32_t four;
  std::memcpy(&four, codes, 4);
  return four;
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

// Writes lines of the codes of 16 rows, `kHalves` of them in one.
template <int kHalves>
void write_lines(const uint8_t* codes, int64_t stride, int64_t lines, uint8_t* to) {
  for (int64_t line = 0; line < lines; line += kHalves, to += kLine) {
    const uint8_t* from = codes + line * 4;
    for (int64_t r = 0; r < kPanel; ++r, from += stride) {
      uint32_t four = four_codes(from);
      if (kHalves == 2) four |= four_codes(from + 4) << 4;
      std::memcpy(to + r * 4, &four, 4);
    }
  }
}

[[noreturn]] void refuse(const char* name, float value) {
  throw_error(ErrorCode::model, name, " has ", value, ", expected finite numbers");
}

}  // namespace

CodePanel::CodePanel(const CodeLayout& layout, int64_t cols)
    : layout_(layout),
      cols_(cols),
      code_stride_(layout.k_blocks(cols) * layout.k_block() + 64),
      scale_stride_(layout.k_blocks(cols) * layout.groups() * scale_bytes(layout.scales)),
      super_stride_(layout.k_blocks(cols) * 2),
      codes_((kPanel + 1) * code_stride_, static_cast<uint8_t>(layout.bias())),
      scales_(kPanel * scale_stride_),
      offsets_(scales_.size()),
      super_scales_(kPanel * super_stride_),
      super_offsets_(super_scales_.size()) {}

void CodePanel::clear(int64_t r) {
  std::memset(codes(r), layout_.bias(), code_stride_);
  std::memset(scales(r), 0, scale_stride_);
  std::memset(offsets(r), 0, scale_stride_);
  std::memset(super_scales(r), 0, super_stride_);
  std::memset(super_offsets(r), 0, super_stride_);
}

void CodePanel::take(const CodePanel& whole, int64_t first_col) {
  const auto copy = [&](const std::vector<uint8_t>& from, int64_t from_stride, int64_t first,
                        std::vector<uint8_t>& to, int64_t to_stride, int64_t bytes) {
    for (int64_t r = 0; r < kPanel; ++r)
      std::memcpy(to.data() + r * to_stride, from.data() + r * from_stride + first, bytes);
  };
  const int64_t group = layout_.row_scales ? 1 : layout_.group;
  const int64_t item = group_bytes(), scale = layout_.row_scales ? 0 : first_col / group * item;
  const int64_t scale_count = layout_.row_scales ? 1 : (cols_ + group - 1) / group;
  const int64_t offset = layout_.offsets == Offsets::zero ? 1 : item;
  const int64_t super = first_col / kSuperBlock * 2;
  const int64_t super_count = (cols_ + kSuperBlock - 1) / kSuperBlock * 2;
  copy(whole.codes_, whole.code_stride_, first_col, codes_, code_stride_, cols_);
  copy(whole.scales_, whole.scale_stride_, scale, scales_, scale_stride_, scale_count * item);
  if (layout_.offsets != Offsets::none)
    copy(whole.offsets_, whole.scale_stride_, scale / item * offset, offsets_, scale_stride_,
         scale_count * offset);
  if (layout_.scales != ScaleType::factor) return;
  copy(whole.super_scales_, whole.super_stride_, super, super_scales_, super_stride_, super_count);
  copy(whole.super_offsets_, whole.super_stride_, super, super_offsets_, super_stride_,
       super_count);
}

void CodePanel::quantize(int64_t r, const float* values) {
  clear(r);
  if (layout_.bits == 4) {
    for (int64_t begin = 0; begin < cols_; begin += layout_.group)
      quantize_group(r, values, begin, std::min(cols_, begin + layout_.group));
    return;
  }
  float largest = 0;
  for (int64_t i = 0; i < cols_; ++i) largest = std::max(largest, std::fabs(values[i]));
  const float scale = largest / 127.0f;
  std::memcpy(scales(r), &scale, 4);
  if (scale == 0) return;
  uint8_t* codes = this->codes(r);
  for (int64_t i = 0; i < cols_; ++i)
    codes[i] =
        static_cast<uint8_t>(128 + std::lrint(std::clamp(values[i] / scale, -127.0f, 127.0f)));
}

void CodePanel::quantize_group(int64_t r, const float* values, int64_t begin, int64_t end) {
  const auto [low, high] = std::minmax_element(values + begin, values + end);
  const uint16_t minimum = f32_to_bf16(*low), scale = f32_to_bf16((*high - *low) / 15.0f);
  std::memcpy(offsets(r) + begin / layout_.group * 2, &minimum, 2);
  std::memcpy(scales(r) + begin / layout_.group * 2, &scale, 2);
  const float m = bf16_to_f32(minimum), s = bf16_to_f32(scale);
  uint8_t* codes = this->codes(r);
  for (int64_t i = begin; i < end; ++i) {
    const float code = s == 0 ? 0.0f : (values[i] - m) / s;
    codes[i] = static_cast<uint8_t>(std::lrint(std::clamp(code, 0.0f, 15.0f)));
  }
}

void CodePanel::check_finite() const {
  const auto check = [&](const char* name, const std::vector<uint8_t>& bytes, ScaleType type) {
    const int64_t size = scale_bytes(type), count = static_cast<int64_t>(bytes.size()) / size;
    if (type == ScaleType::f32) {
      for (int64_t i = 0; i < count; ++i)
        if (!std::isfinite(read_scale(type, bytes.data() + i * 4)))
          refuse(name, read_scale(type, bytes.data() + i * 4));
      return;
    }
    const uint16_t exponent = type == ScaleType::f16 ? 0x7c00 : 0x7f80;
    bool ok = true;
    for (int64_t i = 0; i < count; ++i)
      ok &= (read_u16(bytes.data() + i * 2) & exponent) != exponent;
    for (int64_t i = 0; !ok && i < count; ++i)
      if ((read_u16(bytes.data() + i * 2) & exponent) == exponent)
        refuse(name, read_scale(type, bytes.data() + i * 2));
  };
  const bool factor = layout_.scales == ScaleType::factor;
  const bool minimum = layout_.offsets == Offsets::minimum;
  if (!factor) check("scales", scales_, layout_.scales);
  if (!factor && minimum) check("offsets", offsets_, layout_.scales);
  if (factor) check("super_scales", super_scales_, ScaleType::f16);
  if (factor && minimum) check("super_offsets", super_offsets_, ScaleType::f16);
}

void CodePanel::write(uint8_t* panel) const {
  const CodeLayout& l = layout_;
  const int64_t groups = l.groups(), bytes = scale_bytes(l.scales), lines = l.k_block() / 4;
  for (int64_t b = 0; b < l.k_blocks(cols_); ++b) {
    uint8_t* block = panel + b * l.block_bytes();
    const uint8_t* codes = codes_.data() + b * l.k_block();
    if (l.bits == 8)
      write_lines<1>(codes, code_stride_, lines, block);
    else
      write_lines<2>(codes, code_stride_, lines, block);
    std::memset(block + l.code_bytes(), 0, l.block_bytes() - l.code_bytes());
    if (l.row_scales) continue;
    spread(scales_, scale_stride_, b * groups, groups, bytes, block + l.scales_at());
    const int64_t size = l.offsets == Offsets::zero ? 1 : bytes;
    if (l.offsets != Offsets::none)
      spread(offsets_, scale_stride_, b * groups, groups, size, block + l.offsets_at());
    if (l.scales != ScaleType::factor) continue;
    spread(super_scales_, super_stride_, b, 1, 2, block + l.super_at());
    if (l.offsets == Offsets::minimum)
      spread(super_offsets_, super_stride_, b, 1, 2, block + l.super_at() + kPanel * 2);
  }
  if (l.row_scales)
    spread(scales_, scale_stride_, 0, 1, 4, panel + l.panel_bytes(cols_) - kPanel * 4);
}

void CodePanel::read(const CodeLayout& l, int64_t k, const uint8_t* panel, int64_t r, float* out) {
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

void read_halves(const uint8_t* halves, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count / 2; ++i) {
    out[2 * i] = halves[i] & 15;
    out[2 * i + 1] = halves[i] >> 4;
  }
  if (count % 2) out[count - 1] = halves[count / 2] & 15;
}

bool can_quantize(const CodeLayout& l) {
  if (l.ordered) return false;
  return l.bits == 8 ? l.row_scales : l.scales == ScaleType::bf16 && l.offsets == Offsets::minimum;
}

}  // namespace turbomind
