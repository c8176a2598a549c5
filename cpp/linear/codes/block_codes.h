// Rows of blocks of GGUF files: codes with scales, of which none is quantized again.
#pragma once

#include <string>
#include <vector>

#include "linear/codes/code_source.h"

namespace turbomind {

// A type of blocks, as ggml's ggml-common.h and the package gguf arrange it: 32 columns with
// float16 scales, or 256 columns (K-quants) with integer factors of float16 scales.
struct BlockType {
  // Where the parts of a row of codes go.
  struct Row {
    uint8_t *codes, *scales, *offsets, *super_scales, *super_offsets;
  };
  const char* name;
  int64_t cols;       // of a block
  int64_t bytes;      // of a block
  CodeLayout layout;  // that its values are packed in
  void (*decode)(const uint8_t* block, int64_t blocks, const Row& row);
};

const std::vector<BlockType>& block_types();

class BlockCodes final : public CodeSource {
 public:
  // `file` has the rows [rows, cols] of a tensor. Throws Error(model) for another type or size.
  BlockCodes(const std::string& tensor, const std::string& type, const SourceFile& file,
             int64_t rows, int64_t cols);

  void check(const CodeLayout& layout) const override;
  void decode(const CodePiece& piece, int64_t begin, int64_t count, int64_t at,
              CodePanel& panel) const override;

 private:
  const BlockType* type_;
};

}  // namespace turbomind
