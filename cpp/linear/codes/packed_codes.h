// Rows of codes as GPTQ, AWQ and compressed-tensors store them: codes, scales and zero points in
// tensors of their own, whose integers of 4 and 8 bits are packed in words of 32 bits.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "linear/codes/code_source.h"

namespace turbomind {

// How a tensor holds a matrix [rows, n] of integers; the low bits of a word come first.
enum class Packing : uint8_t {
  bytes,         // [rows, n] int8, from which 2^(bits - 1) was subtracted
  inputs,        // [rows, words of n]
  inputs_first,  // [words of n, rows]
  outputs,       // [words of rows, n]
  outputs_last,  // [n, words of rows]
};

// A tensor of integers. `interleaved`: the fields of a word are its outputs 0 2 4 6 1 3 5 7 (AWQ).
// `add` is added to each word, modulo 2^32 (GPTQ's zero points are stored less 1).
struct PackedIntegers {
  std::string tensor;
  SourceFile file;
  Packing packing = Packing::inputs;
  bool interleaved = false;
  uint32_t add = 0;
};

// Scales [rows, groups], or [groups, rows] where `groups_first`. Not ScaleType::factor.
struct PackedScales {
  std::string tensor;
  SourceFile file;
  ScaleType type = ScaleType::f16;
  bool groups_first = false;
};

class PackedCodes : public CodeSource {
 public:
  // `group`: columns of a scale in the file, a multiple of those of the format, or 0: a row has
  // one. Throws Error(model) for tensors of another size than that.
  PackedCodes(int64_t rows, int64_t cols, int bits, int64_t group, PackedIntegers codes,
              PackedScales scales, std::optional<PackedIntegers> zeros, ByteSpan columns);

  void check(const CodeLayout& layout) const override;
  void decode(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
              CodePanel& panel) const override;

 private:
  void add_tensor(const std::string& name, const SourceFile& file, CodeTensor place,
                  int64_t expected);
  void add_integers(const PackedIntegers& integers, int64_t n);
  void decode_codes(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
                    CodePanel& panel) const;
  void decode_scales(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
                     CodePanel& panel) const;
  void decode_zeros(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
                    CodePanel& panel) const;
  int64_t groups() const { return group_ ? (cols + group_ - 1) / group_ : 1; }
  // The scale of the file that group g of the format has.
  int64_t stored_group(const CodeLayout& layout, int64_t g) const {
    return group_ ? g * layout.group / group_ : 0;
  }

  const int bits_;
  const int64_t group_;
  const PackedIntegers codes_;
  const PackedScales scales_;
  const std::optional<PackedIntegers> zeros_;
};

}  // namespace turbomind
