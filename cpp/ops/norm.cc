#include "ops/norm.h"

#include <algorithm>

#include "core/error.h"
#include "cpu/isa_dispatch.h"
#include "cuda/dispatch.h"
#include "cuda/gpu_context.h"
#include "ops/dispatch.h"
#include "ops/norm_kernels.h"

namespace turbomind {

TM_KERNEL_TABLE(NormKernels, norm_kernels)
TM_GPU_TABLE(NormCuda, kNormCuda, norm_cuda)

namespace {

// Below this many elements a barrier costs more than the work it shares out.
constexpr int64_t kElementsPerTask = 16384;

constexpr OpTypes kXTypes{"rms_norm", "x", {DType::f32}, {DType::f32}};
constexpr OpTypes kYTypes{
    "rms_norm", "y", {DType::f32, DType::bf16}, {DType::f32, DType::f16, DType::bf16}};

void check(const Context& ctx, const Norm& norm, const Mat& x, const Mat& y) {
  if ((norm.kind == NormKind::rms) != (norm.weight != nullptr)) {
    throw_error(ErrorCode::internal, "rms_norm: got kind ", static_cast<int>(norm.kind),
                norm.weight ? " with" : " without", " a weight, expected one for kind rms alone");
  }
  check_dtype(ctx, kXTypes, x.dtype);
  check_dtype(ctx, kYTypes, y.dtype);
  if (x.rows != y.rows || x.cols != y.cols) {
    throw_error(ErrorCode::internal, "rms_norm: x is [", x.rows, ", ", x.cols, "] but y is [",
                y.rows, ", ", y.cols, "]");
  }
}

int64_t padded_end(const Mat& y) {
  return std::min(padded_cols(y.cols), std::max(y.stride, y.cols));
}

void on_gpu(GpuContext& gpu, const Norm& norm, const Mat& x, const Mat& y, int64_t padded) {
  DeviceNorm n = device_norm(norm, x, y);
  n.padded = static_cast<int32_t>(padded);
  norm_cuda(gpu.kind()).rms_norm(gpu.handle(), n);
}

void on_cpu(Context& ctx, const Norm& norm, const Mat& x, const Mat& y, int64_t padded) {
  const NormKernels& kernels = norm_kernels(ctx.isa);
  const bool bf16 = y.dtype == DType::bf16;
  const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, x.cols));
  ctx.pool.parallel_for(x.rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      void* out = bf16 ? static_cast<void*>(y.u16(r)) : static_cast<void*>(y.f32(r));
      kernels.rms_row(
          {x.f32(r), out, bf16, x.cols, padded, norm.weight, norm.weight_offset, norm.eps});
    }
  });
}

void norm_rows(Context& ctx, const Norm& norm, const Mat& x, const Mat& y, int64_t padded) {
  check(ctx, norm, x, y);
  const double elements = static_cast<double>(x.rows) * static_cast<double>(x.cols);
  ProfileScope scope(ctx.profiler, Op::norm,
                     elements * static_cast<double>(4 + dtype_bytes(y.dtype)), 4 * elements,
                     ctx.profiler.device);
  dispatch(ctx, on_cpu, on_gpu, norm, x, y, padded);
}

}  // namespace

void rms_norm(Context& ctx, const Norm& norm, const Mat& x, const Mat& y) {
  norm_rows(ctx, norm, x, y, padded_end(y));
}

void rms_norm_in_place(Context& ctx, const Norm& norm, const Mat& x) {
  norm_rows(ctx, norm, x, x, x.cols);
}

DeviceNorm device_norm(const Norm& norm, const Mat& x, const Mat& y) {
  DeviceNorm n;
  n.x = x.f32(0);
  n.y = y.data;
  n.weight = norm.weight;
  n.x_stride = x.stride;
  n.y_stride = y.stride;
  n.rows = static_cast<int32_t>(x.rows);
  n.cols = static_cast<int32_t>(x.cols);
  n.padded = static_cast<int32_t>(padded_end(y));
  n.weight_offset = norm.weight ? norm.weight_offset : 0;
  n.eps = norm.eps;
  n.y_dtype = y.dtype;
  return n;
}

}  // namespace turbomind
