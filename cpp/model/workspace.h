// Matrices of a step that are reused from step to step.
#pragma once

#include "core/tensor.h"
#include "cuda/device_or_host_buffer.h"

namespace turbomind {

// Memory of the context's device that only grows, so that steps of one size allocate nothing.
// Growing waits for the device. Nothing is known of the contents: they may be NaN even in padding,
// so whoever writes a row that `linear` reads zeroes its padding as well.
class Workspace {
 public:
  // Returns a [rows, cols] matrix at the start of the memory, valid until a larger one is asked
  // for. Its stride has the padding that `linear` wants.
  Mat view(const Context& ctx, int64_t rows, int64_t cols, DType dtype);
  // The same, without padding on a GPU, whose kernels for pages want none.
  Mat dense_view(const Context& ctx, int64_t rows, int64_t cols, DType dtype);
  // Has the memory of a view().
  void reserve(const Context& ctx, int64_t rows, int64_t cols, DType dtype);

 private:
  void grow(const Context& ctx, size_t bytes);

  Buffer buffer_;
};

}  // namespace turbomind
