#include "ops/embedding.h"

#include "core/error.h"
#include "cuda/dispatch.h"
#include "cuda/gpu_context.h"
#include "ops/dispatch.h"
#include "ops/embedding_cuda.h"

namespace turbomind {

TM_GPU_TABLE(EmbeddingCuda, kEmbeddingCuda, embedding_cuda)

namespace {

constexpr OpTypes kYTypes{"embedding", "y", {DType::f32}, {DType::f32}};

void on_gpu(GpuContext& gpu, const LinearWeight& table, const int32_t* ids, float scale,
            const Mat& y, int64_t first) {
  DeviceEmbedding e;
  e.table = table.data;
  e.ids = ids;
  e.y = y.f32(0);
  e.table_stride = padded_cols(table.k);
  e.y_stride = y.stride;
  e.rows = static_cast<int32_t>(y.rows);
  e.cols = static_cast<int32_t>(y.cols);
  e.vocab = static_cast<int32_t>(table.n);
  e.first = static_cast<int32_t>(first);
  e.scale = scale;
  e.dtype = table.format->source_dtype();
  embedding_cuda(gpu.kind()).embed(gpu.handle(), e);
}

void on_cpu(Context& ctx, const LinearWeight& table, const int32_t* ids, float scale, const Mat& y,
            int64_t first) {
  if (first != 0) throw_error(ErrorCode::internal, "embedding: got a part of a table on the CPU");
  const int64_t padded = y.stride < padded_cols(y.cols) ? y.stride : padded_cols(y.cols);
  ctx.pool.parallel_for(y.rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      float* out = y.f32(r);
      table.format->unpack_row(table, ids[r], out);
      if (scale != 1.0f) {
        for (int64_t c = 0; c < y.cols; ++c) out[c] *= scale;
      }
      for (int64_t c = y.cols; c < padded; ++c) out[c] = 0;
    }
  });
}

}  // namespace

void embedding(Context& ctx, const LinearWeight& table, const int32_t* ids, float scale,
               const Mat& y, int64_t first) {
  check_dtype(ctx, kYTypes, y.dtype);
  if (y.cols != table.k)
    throw_error(ErrorCode::internal, "embedding: y has ", y.cols, " columns, expected ", table.k);
  const double bytes = 2.0 * y.rows * y.cols * sizeof(float);
  const ProfileScope profile(ctx.profiler, Op::embed, bytes, 0, ctx.profiler.device);
  dispatch(ctx, on_cpu, on_gpu, table, ids, scale, y, first);
}

}  // namespace turbomind
