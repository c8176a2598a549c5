// Formats of codes for tests, and random codes, scales and offsets as a checkpoint would have them.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "linear/code_format.h"
#include "tests/linear/code_rows.h"

namespace turbomind {

// Every kind of scale and offset; groups shorter and longer than those of x.
inline std::vector<CodeLayout> code_layouts() {
  using S = ScaleType;
  using O = Offsets;
  return {{8, 128, true, S::f32, O::none, false},       {4, 128, false, S::bf16, O::minimum, false},
          {4, 32, false, S::f16, O::none, false},       {8, 32, false, S::f16, O::minimum, false},
          {4, 32, false, S::factor, O::minimum, false}, {8, 16, false, S::factor, O::none, false},
          {4, 64, false, S::f16, O::zero, true},        {8, 256, false, S::f32, O::zero, false},
          {4, 128, true, S::f32, O::none, false},       {8, 16, false, S::bf16, O::none, true}};
}

// The layout of a name; null for a dense format.
inline const CodeLayout* layout_of(const std::string& name) {
  static const std::vector<CodeLayout> all = code_layouts();
  for (const CodeLayout& layout : all)
    if (name == code_format(layout).name()) return &layout;
  return nullptr;
}

// Rows of random codes, with the memory that they are in.
struct RandomCodes {
  CodeRows rows;
  std::vector<uint8_t> codes, scales, offsets, super_scales, super_offsets;
  std::vector<int32_t> columns;

  RandomCodes(const CodeLayout& l, int64_t n, int64_t k, std::mt19937& rng) {
    const int64_t groups = l.row_scales ? n : n * ((k + l.group - 1) / l.group);
    const int most = l.bits == 4 ? 15 : l.offsets == Offsets::minimum ? 127 : 255;
    rows.rows = n;
    rows.cols = k;
    codes.resize(n * k);
    for (uint8_t& c : codes) c = static_cast<uint8_t>(rng() % (most + 1));
    const bool factor = l.scales == ScaleType::factor;
    scales = random_scales(l.scales, groups, 0.02f, rng);
    if (l.offsets == Offsets::minimum) offsets = random_scales(l.scales, groups, -0.1f, rng);
    if (l.offsets == Offsets::zero) {
      offsets.resize(groups);
      for (uint8_t& z : offsets) z = static_cast<uint8_t>(rng() % (most + 1));
    }
    if (factor) {
      const int64_t blocks = n * (k / kSuperBlock);
      super_scales = random_scales(ScaleType::f16, blocks, 0.001f, rng);
      if (l.offsets == Offsets::minimum)
        super_offsets = random_scales(ScaleType::f16, blocks, 0.002f, rng);
    }
    if (l.ordered) {
      columns.resize(k);
      std::iota(columns.begin(), columns.end(), 0);
      std::shuffle(columns.begin(), columns.end(), rng);
    }
    const auto span = [](const auto& v) {
      return ByteSpan{reinterpret_cast<const uint8_t*>(v.data()),
                      static_cast<int64_t>(v.size() * sizeof(v[0]))};
    };
    rows.codes = span(codes);
    rows.scales = span(scales);
    rows.offsets = span(offsets);
    rows.super_scales = span(super_scales);
    rows.super_offsets = span(super_offsets);
    rows.columns = span(columns);
  }

 private:
  static std::vector<uint8_t> random_scales(ScaleType type, int64_t count, float size,
                                            std::mt19937& rng) {
    std::uniform_real_distribution<float> uniform(0.5f, 1.0f);
    const int64_t bytes = scale_bytes(type);
    std::vector<uint8_t> out(count * bytes);
    for (int64_t i = 0; i < count; ++i) {
      const float f = size * uniform(rng);
      const uint16_t h = type == ScaleType::f16 ? f32_to_f16(f) : f32_to_bf16(f);
      if (type == ScaleType::factor)
        out[i] = static_cast<uint8_t>(rng() % 64);
      else if (type == ScaleType::f32)
        std::memcpy(out.data() + i * bytes, &f, 4);
      else
        std::memcpy(out.data() + i * bytes, &h, 2);
    }
    return out;
  }
};

}  // namespace turbomind
