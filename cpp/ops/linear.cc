#include "ops/linear.h"

#include <algorithm>

#include "core/error.h"
#include "ops/dispatch.h"

namespace turbomind {

namespace {

void expect(bool ok, const char* what, int64_t seen, int64_t expected) {
  if (!ok)
    throw_error(ErrorCode::internal, "linear: ", what, " is ", seen, ", expected ", expected);
}

// On a GPU the weight's format narrows both to its own type.
constexpr OpTypes kXTypes{"linear", "x", {DType::f32, DType::bf16}, {DType::f16, DType::bf16}};
constexpr OpTypes kYTypes{
    "linear", "y", {DType::f32, DType::bf16}, {DType::f32, DType::f16, DType::bf16}};

void check(const Context& ctx, const LinearWeight& w, const Mat& x, const Mat& y,
           const LinearArgs& args) {
  if (w.format == nullptr || w.data == nullptr) {
    throw_error(ErrorCode::internal, "linear: the weight has no format or no data");
  }
  const bool gated = is_gated(args.epilogue);
  check_dtype(ctx, kXTypes, x.dtype);
  check_dtype(ctx, kYTypes, y.dtype);
  expect(x.cols == w.k, "x.cols", x.cols, w.k);
  expect(x.stride >= padded_cols(x.cols), "x.stride", x.stride, padded_cols(x.cols));
  expect(y.rows == x.rows, "y.rows", y.rows, x.rows);
  expect(y.stride >= y.cols, "y.stride", y.stride, y.cols);
  if (gated) {
    expect(w.n % 32 == 0, "n of a gated weight", w.n, round_up(w.n, 32));
    // The last block of 16 gates and its ups may be padded with zero rows.
    expect(round_up(y.cols, 16) == w.n / 2, "y.cols", y.cols, w.n / 2);
  } else {
    expect(args.part ? y.cols >= args.first_col + w.n : y.cols == w.n, "y.cols", y.cols,
           args.first_col + w.n);
  }
  if (args.part && (gated || ctx.gpu))
    throw_error(ErrorCode::internal,
                "linear: a part of a matrix, expected no epilogue of gates "
                "and no GPU");
  if (args.epilogue == Epilogue::add && y.dtype != DType::f32) {
    throw_error(ErrorCode::internal, "linear: y.dtype is ", dtype_name(y.dtype),
                ", expected float32 for Epilogue::add");
  }
  if (args.addend != nullptr) {
    if (args.addend->dtype != DType::f32) {
      throw_error(ErrorCode::internal, "linear: addend.dtype is ", dtype_name(args.addend->dtype),
                  ", expected float32");
    }
    expect(args.addend->rows == x.rows, "addend.rows", args.addend->rows, x.rows);
    const int64_t cols = args.part ? y.cols : w.n;
    expect(args.addend->cols == cols, "addend.cols", args.addend->cols, cols);
  }
}

// Bytes that a product of a group moves at least. On a GPU the host does not know which weights
// have rows, so as many as can have one count.
double group_bytes(const Context& ctx, const WeightGroup& w, const int32_t* begin, const Mat& x,
                   const Mat& y) {
  const auto count = static_cast<int64_t>(w.weights.size());
  int64_t used = std::min(count, x.rows);
  if (ctx.gpu == nullptr) {
    used = 0;
    for (int64_t i = 0; i < count; ++i) used += begin[i] < begin[i + 1] ? 1 : 0;
  }
  return static_cast<double>(used) * static_cast<double>(w.weights[0].bytes) +
         static_cast<double>(x.rows * x.cols * dtype_bytes(x.dtype)) +
         static_cast<double>(y.rows * y.cols * dtype_bytes(y.dtype));
}

}  // namespace

void linear_group(Context& ctx, Op op, const WeightGroup& w, const int32_t* begin,
                  int64_t most_rows, const Mat& x, const Mat& y, Epilogue epilogue) {
  if (w.weights.empty()) throw_error(ErrorCode::internal, "linear_group: the group has no weights");
  const LinearWeight& first = w.weights[0];
  check(ctx, first, x, y, {.bias = w.bias(0), .epilogue = epilogue});
  for (const LinearWeight& each : w.weights) {
    if (each.format != first.format || each.n != first.n || each.k != first.k)
      throw_error(ErrorCode::internal, "linear_group: weights differ in format or shape");
  }
  if (x.rows == 0) return;
  const ProfileScope profile(ctx.profiler, op,
                             ctx.profiler.enabled ? group_bytes(ctx, w, begin, x, y) : 0,
                             2.0 * x.rows * first.n * first.k, ctx.profiler.device);
  first.format->matmul_group(ctx, w, begin, most_rows, x, y, epilogue);
}

void linear(Context& ctx, Op op, const LinearWeight& w, const Mat& x, const Mat& y,
            const LinearArgs& args) {
  check(ctx, w, x, y, args);
  if (x.rows == 0) return;
  const double moved = static_cast<double>(w.bytes) +
                       static_cast<double>(x.rows * x.cols * dtype_bytes(x.dtype)) +
                       static_cast<double>(y.rows * y.cols * dtype_bytes(y.dtype));
  const ProfileScope profile(ctx.profiler, op, moved, 2.0 * x.rows * w.n * w.k,
                             ctx.profiler.device);
  w.format->matmul(ctx, w, x, y, args);
}

}  // namespace turbomind
