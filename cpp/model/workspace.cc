#include "model/workspace.h"

#include "linear/weight_format.h"

namespace turbomind {

namespace {

int64_t stride_of(const Context& ctx, int64_t cols) {
  return ctx.gpu ? padded_cols(cols) : activation_stride(cols);
}

size_t bytes_of(const Context& ctx, int64_t rows, int64_t cols, DType dtype) {
  return static_cast<size_t>(rows) * stride_of(ctx, cols) * dtype_bytes(dtype);
}

}  // namespace

Mat Workspace::view(const Context& ctx, int64_t rows, int64_t cols, DType dtype) {
  const size_t bytes = bytes_of(ctx, rows, cols, dtype);
  if (bytes > buffer_.size()) grow(ctx, bytes + bytes / 2);
  return {buffer_.data(), dtype, rows, cols, stride_of(ctx, cols)};
}

Mat Workspace::dense_view(const Context& ctx, int64_t rows, int64_t cols, DType dtype) {
  Mat m = view(ctx, rows, cols, dtype);
  if (ctx.gpu) m.stride = m.cols;
  return m;
}

void Workspace::reserve(const Context& ctx, int64_t rows, int64_t cols, DType dtype) {
  const size_t bytes = bytes_of(ctx, rows, cols, dtype);
  if (bytes > buffer_.size()) grow(ctx, bytes);
}

void Workspace::grow(const Context& ctx, size_t bytes) {
  if (ctx.gpu) {
    ctx.gpu->stream().synchronize();
    ctx.gpu->moved();
  }
  buffer_ = Buffer();  // frees the old memory first
  buffer_ = Buffer(ctx, bytes);
}

}  // namespace turbomind
