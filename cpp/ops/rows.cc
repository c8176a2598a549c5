#include "ops/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "cuda/dispatch.h"
#include "cuda/gpu_context.h"
#include "ops/dispatch.h"
#include "ops/rows_cuda.h"

namespace turbomind {

TM_GPU_TABLE(RowsCuda, kRowsCuda, rows_cuda)

namespace {

void check_same(const char* op, const Mat& x, const Mat& y, bool rows) {
  if (x.dtype != y.dtype || x.cols != y.cols || (rows && x.rows != y.rows)) {
    throw_error(ErrorCode::internal, op, ": x is ", dtype_name(x.dtype), " [", x.rows, ", ", x.cols,
                "] but y is ", dtype_name(y.dtype), " [", y.rows, ", ", y.cols, "]");
  }
}

constexpr OpTypes kAddTypes{"add_scaled", "x", {DType::f32}, {DType::f32}};
constexpr OpTypes kSumTypes{"sum_rows", "x", {DType::f32}, {}};
constexpr OpTypes kCapTypes{"scale_and_cap", "x", {DType::f32}, {DType::f32}};

int64_t gathered_bytes(const Mat& x, const Mat& y) {
  return std::min({x.stride, y.stride, padded_cols(x.cols)}) *
         static_cast<int64_t>(dtype_bytes(x.dtype));
}

void gather_on_cpu(Context&, const Mat& x, const int32_t* ids, const Mat& y) {
  const int64_t element = static_cast<int64_t>(dtype_bytes(x.dtype));
  for (int64_t r = 0; r < y.rows; ++r)
    std::memcpy(y.row<uint8_t>(0) + r * y.stride * element,
                x.row<uint8_t>(0) + ids[r] * x.stride * element, gathered_bytes(x, y));
}

void gather_on_gpu(GpuContext& gpu, const Mat& x, const int32_t* ids, const Mat& y) {
  const int64_t element = static_cast<int64_t>(dtype_bytes(x.dtype));
  DeviceGather g;
  g.x = x.data;
  g.rows = ids;
  g.y = y.data;
  g.x_stride = x.stride * element;
  g.y_stride = y.stride * element;
  g.row_bytes = static_cast<int32_t>(gathered_bytes(x, y));
  g.count = static_cast<int32_t>(y.rows);
  rows_cuda(gpu.kind()).gather(gpu.handle(), g);
}

void add_on_cpu(Context& ctx, const Mat& x, float scale, const Mat& y, const float* factor) {
  const float then = factor ? *factor : 1.0f;
  ctx.pool.parallel_for(x.rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r)
      for (int64_t c = 0; c < x.cols; ++c) y.f32(r)[c] = (y.f32(r)[c] + scale * x.f32(r)[c]) * then;
  });
}

void add_on_gpu(GpuContext& gpu, const Mat& x, float scale, const Mat& y, const float* factor) {
  DeviceScaledAdd a;
  a.x = y.f32(0);
  a.y = x.f32(0);
  a.x_stride = y.stride;
  a.y_stride = x.stride;
  a.rows = static_cast<int32_t>(x.rows);
  a.cols = static_cast<int32_t>(x.cols);
  a.scale = scale;
  a.factor = factor;
  rows_cuda(gpu.kind()).scaled_add(gpu.handle(), a);
}

// Adds by pieces of columns that stay in the first-level cache.
void sum_row(const std::vector<Mat>& parts, int64_t row, float scale, bool add, const Mat& y) {
  constexpr int64_t kPiece = 512;
  float sums[kPiece];
  for (int64_t first = 0; first < y.cols; first += kPiece) {
    const int64_t count = std::min(kPiece, y.cols - first);
    std::memcpy(sums, parts[0].f32(row) + first, count * sizeof(float));
    for (size_t p = 1; p < parts.size(); ++p) {
      const float* part = parts[p].f32(row) + first;
      for (int64_t i = 0; i < count; ++i) sums[i] += part[i];
    }
    float* out = y.f32(row) + first;
    for (int64_t i = 0; i < count; ++i) out[i] = add ? out[i] + scale * sums[i] : scale * sums[i];
  }
}

void sum_on_cpu(Context& ctx, const std::vector<Mat>& parts, float scale, bool add, const Mat& y) {
  ctx.pool.parallel_for(y.rows, 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) sum_row(parts, r, scale, add, y);
  });
}

void scale_and_cap_on_cpu(Context& ctx, float scale, float cap, const Mat& x) {
  constexpr int64_t kPiece = 1 << 14;
  const int64_t pieces = (x.cols + kPiece - 1) / kPiece;
  ctx.pool.parallel_for(x.rows * pieces, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      float* row = x.f32(i / pieces);
      const int64_t first = i % pieces * kPiece, last = std::min(x.cols, first + kPiece);
      for (int64_t c = first; c < last; ++c) {
        const float scaled = scale * row[c];
        row[c] = cap != 0 ? cap * std::tanh(scaled / cap) : scaled;
      }
    }
  });
}

void scale_and_cap_on_gpu(GpuContext& gpu, float scale, float cap, const Mat& x) {
  DeviceScaleCap c;
  c.x = x.f32(0);
  c.stride = x.stride;
  c.rows = static_cast<int32_t>(x.rows);
  c.cols = static_cast<int32_t>(x.cols);
  c.scale = scale;
  c.cap = cap;
  rows_cuda(gpu.kind()).scale_and_cap(gpu.handle(), c);
}

}  // namespace

void gather_rows(Context& ctx, const Mat& x, const int32_t* ids, const Mat& y) {
  check_same("gather_rows", x, y, false);
  dispatch(ctx, gather_on_cpu, gather_on_gpu, x, ids, y);
}

void add_scaled(Context& ctx, const Mat& x, float scale, const Mat& y, const float* factor) {
  check_same("add_scaled", x, y, true);
  check_dtype(ctx, kAddTypes, x.dtype);
  dispatch(ctx, add_on_cpu, add_on_gpu, x, scale, y, factor);
}

void sum_rows(Context& ctx, const std::vector<Mat>& parts, float scale, bool add, const Mat& y) {
  if (parts.empty() || ctx.gpu)
    throw_error(ErrorCode::internal, "sum_rows: got ", parts.size(), " parts on the ",
                ctx.gpu ? "GPU" : "CPU", ", expected 1 or more on the CPU");
  for (const Mat& part : parts) {
    check_same("sum_rows", part, y, true);
    check_dtype(ctx, kSumTypes, part.dtype);
  }
  const double elements = static_cast<double>(y.rows * y.cols);
  const double read = static_cast<double>(parts.size()) + add;  // matrices
  const ProfileScope profile(ctx.profiler, Op::reduce, 4 * elements * (read + 1), elements * read,
                             ctx.profiler.device);
  sum_on_cpu(ctx, parts, scale, add, y);
}

void scale_and_cap(Context& ctx, float scale, float cap, const Mat& x) {
  check_dtype(ctx, kCapTypes, x.dtype);
  dispatch(ctx, scale_and_cap_on_cpu, scale_and_cap_on_gpu, scale, cap, x);
}

}  // namespace turbomind
