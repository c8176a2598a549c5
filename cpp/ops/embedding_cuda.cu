#include "ops/embedding_cuda.h"

#include "core/error.h"
#include "cuda/four_cuda.h"
#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = 256;

// A block per row, a thread per four columns.
template <typename T>
TM_KERNEL(kThreads, 4)
void embed_rows(const TM_GRID_CONSTANT DeviceEmbedding p) {
  let_next_start();
  wait_for_previous();
  const int32_t id = load(p.ids + blockIdx.x) - p.first;
  const bool known = id >= 0 && id < p.vocab;
  const T* row = static_cast<const T*>(p.table) + (known ? id : 0) * p.table_stride;
  float* y = p.y + blockIdx.x * p.y_stride;
  const int pieces = (p.cols + 3) / 4;
#pragma unroll 4
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    // The table's rows are padded, so a last part of four can be read whole.
    const uint2 bits = known ? load(reinterpret_cast<const uint2*>(row + 4 * i)) : make_uint2(0, 0);
    const float2 a = unpack2<T>(bits.x), b = unpack2<T>(bits.y);
    store_four(y, 4 * i, p.cols,
               make_float4(a.x * p.scale, a.y * p.scale, b.x * p.scale, b.y * p.scale));
  }
}

void embed(StreamHandle stream, const DeviceEmbedding& e) {
  if ((e.dtype != DType::bf16 && e.dtype != DType::f16) || e.cols < 1 || e.table_stride % 8 != 0 ||
      e.table_stride < e.cols || e.y_stride < e.cols)
    throw_error(ErrorCode::internal, "embedding: got a table of ", dtype_name(e.dtype), " with ",
                e.cols, " columns, strides ", e.table_stride, " and ", e.y_stride,
                ", expected 16-bit rows of a multiple of 8 that hold the columns");
  const dim3 grid(static_cast<unsigned>(e.rows));
  if (e.dtype == DType::bf16)
    launch<embed_rows<Bf16>>(stream, grid, kThreads, 0, e);
  else
    launch<embed_rows<F16>>(stream, grid, kThreads, 0, e);
}

}  // namespace

extern const EmbeddingCuda kEmbeddingCuda;
const EmbeddingCuda kEmbeddingCuda{embed};

}  // namespace turbomind::TM_CUDA_NS
