#include "ops/linear.h"

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
  const bool gated = args.epilogue == Epilogue::silu_mul;
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
    expect(y.cols == w.n, "y.cols", y.cols, w.n);
  }
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
    expect(args.addend->cols == w.n, "addend.cols", args.addend->cols, w.n);
  }
}

}  // namespace

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
