// How a matrix of integer codes is packed: plain data that the kernels of every instruction set
// read. A value is scale * (code - zero) or scale * code + minimum; scales belong to groups of K.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/tensor.h"

namespace turbomind {

// Outputs per panel of packed weights. A panel holds all of K, ascending, 16 outputs side by side.
constexpr int64_t kPanel = 16;

// Type of a group's scale. `factor`: an int8 times a float16 that 256 values share (K-quants).
enum class ScaleType : uint8_t { f32, f16, bf16, factor };

// What turns code * scale into a value. `none`: the code of zero is 2^(bits - 1). `zero`: a uint8
// per group is the code of zero. `minimum`: a value of the scales' type per group is added.
enum class Offsets : uint8_t { none, zero, minimum };

constexpr int64_t kSuperBlock = 256;  // values that share the float16 scales of ScaleType::factor

constexpr int64_t scale_bytes(ScaleType t) {
  return t == ScaleType::f32 ? 4 : t == ScaleType::factor ? 1 : 2;
}

// A panel is a sequence of K blocks: codes, scales and offsets of the block's groups, and float16
// scales and minima of ScaleType::factor, each of 16 outputs; padded to a cache line. Where a row
// has one scale, the 16 float32 scales follow the last block.
//
// Codes: lines of 64 bytes are 16 outputs times four consecutive k. Of 4-bit codes a line has
// those of two such lines: the first in the low halves of its bytes.
struct CodeLayout {
  int bits = 8;             // 4 or 8
  int group = 128;          // values of K whose products are summed as integers
  bool row_scales = false;  // one float32 scale per output
  ScaleType scales = ScaleType::f32;
  Offsets offsets = Offsets::none;
  bool ordered = false;  // the codes' columns have an order of their own, stored after the panels

  // Values of x that share a scale.
  constexpr int64_t x_group() const { return group < 32 ? 32 : group; }
  // Values of K per block: chunks of K end at group borders.
  constexpr int64_t k_block() const {
    return scales == ScaleType::factor || group > 128 ? kSuperBlock : 128;
  }
  constexpr int64_t groups() const { return k_block() / group; }  // of a block
  constexpr int64_t code_bytes() const { return k_block() * kPanel * bits / 8; }
  // Bytes of the scales, and of the offsets, of one group.
  constexpr int64_t group_scale_bytes() const {
    return row_scales ? 0 : kPanel * scale_bytes(scales);
  }
  constexpr int64_t group_offset_bytes() const {
    return offsets == Offsets::none   ? 0
           : offsets == Offsets::zero ? kPanel
                                      : kPanel * scale_bytes(scales);
  }
  constexpr int64_t scales_at() const { return code_bytes(); }
  constexpr int64_t offsets_at() const { return scales_at() + groups() * group_scale_bytes(); }
  constexpr int64_t super_at() const { return offsets_at() + groups() * group_offset_bytes(); }
  constexpr int64_t super_bytes() const {
    return scales != ScaleType::factor ? 0 : kPanel * 2 * (offsets == Offsets::minimum ? 2 : 1);
  }
  constexpr int64_t block_bytes() const { return round_up(super_at() + super_bytes(), 64); }
  constexpr int64_t k_blocks(int64_t k) const { return round_up(k, k_block()) / k_block(); }
  constexpr int64_t panel_bytes(int64_t k) const {
    return k_blocks(k) * block_bytes() + (row_scales ? kPanel * 4 : 0);
  }
  // The code whose product the kernels leave out of integer sums: codes of 8 bits are multiplied as
  // code - 128, so that a signed byte holds them; with a minimum they are at most 127.
  constexpr int bias() const {
    return offsets == Offsets::minimum ? 0 : bits == 8 ? 128 : offsets == Offsets::none ? 8 : 0;
  }
};

// One row of x in one group: x is scale * code, codes are -127 to 127.
struct XGroup {
  float scale;
  float sum;     // scale * the sum of the codes
  int32_t bias;  // what the integer sum starts from: -CodeLayout::bias() * the sum of the codes
};

}  // namespace turbomind
