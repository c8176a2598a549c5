// Rows of the embedding table on a GPU; the op is that of ops/embedding.h.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "cuda/types.h"

namespace turbomind {

// y [rows, cols] float32 = table rows ids[0..rows) - first, * scale. Pointers are device memory. A
// row whose id is not in [first, first + vocab), of another rank's part of the table for one,
// becomes zeros.
struct DeviceEmbedding {
  const void* table = nullptr;   // [vocab][table_stride], 16-bit, aligned to 16 bytes
  const int32_t* ids = nullptr;  // [rows]
  float* y = nullptr;            // [rows][y_stride]
  int64_t table_stride = 0;      // elements; a multiple of 8
  int64_t y_stride = 0;
  int32_t rows = 0;
  int32_t cols = 0;  // at most table_stride
  int32_t vocab = 0;
  int32_t first = 0;
  float scale = 1;
  DType dtype = DType::bf16;  // of the table: bf16 or f16
};

struct EmbeddingCuda {
  // Throws Error(internal) for sizes or a type out of range.
  void (*embed)(StreamHandle stream, const DeviceEmbedding& embedding);
};

namespace cuda_emulated {
extern const EmbeddingCuda kEmbeddingCuda;
}
namespace cuda {  // where nvcc was there
extern const EmbeddingCuda kEmbeddingCuda;
}

}  // namespace turbomind
