// Elementwise work: a thread takes 16 bytes (four columns), a block 256 of them in a row.
#include "ops/rows_cuda.h"

#include "core/error.h"
#include "cuda/four_cuda.h"
#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = 256;
constexpr int kColsPerBlock = 4 * kThreads;

// A block per row: rows are a few KiB, and there are few of them.
template <typename Word>
TM_KERNEL(kThreads, 4)
void gather_rows(const TM_GRID_CONSTANT DeviceGather p) {
  let_next_start();
  wait_for_previous();
  const int32_t from = load(p.rows + blockIdx.x);
  const uint8_t* x = static_cast<const uint8_t*>(p.x) + (from < 0 ? 0 : from) * p.x_stride;
  uint8_t* y = static_cast<uint8_t*>(p.y) + blockIdx.x * p.y_stride;
  const int words = p.row_bytes / static_cast<int>(sizeof(Word));
#pragma unroll 4
  for (int i = threadIdx.x; i < words; i += kThreads) {
    Word word{};
    if (from >= 0) word = load(reinterpret_cast<const Word*>(x) + i);
    store(reinterpret_cast<Word*>(y) + i, word);
  }
}

TM_KERNEL(kThreads, 4) void scaled_add_rows(const TM_GRID_CONSTANT DeviceScaledAdd p) {
  let_next_start();
  wait_for_previous();
  const int c = blockIdx.y * kColsPerBlock + 4 * threadIdx.x;
  if (c >= p.cols) return;
  float* row = p.x + blockIdx.x * p.x_stride;
  const float4 x = load_four(row, c, p.cols);
  const float4 y = load_four(p.y + blockIdx.x * p.y_stride, c, p.cols);
  const float then = p.factor ? load_constant(p.factor) : 1.0f;
  store_four(row, c, p.cols,
             make_float4(fma(p.scale, y.x, x.x) * then, fma(p.scale, y.y, x.y) * then,
                         fma(p.scale, y.z, x.z) * then, fma(p.scale, y.w, x.w) * then));
}

TM_DEVICE float scaled_and_capped(float x, const DeviceScaleCap& p) {
  const float scaled = p.scale * x;
  return p.cap != 0 ? p.cap * tanh(scaled / p.cap) : scaled;
}

TM_KERNEL(kThreads, 4) void scale_and_cap_rows(const TM_GRID_CONSTANT DeviceScaleCap p) {
  let_next_start();
  wait_for_previous();
  const int c = blockIdx.y * kColsPerBlock + 4 * threadIdx.x;
  if (c >= p.cols) return;
  float* row = p.x + blockIdx.x * p.stride;
  const float4 x = load_four(row, c, p.cols);
  store_four(row, c, p.cols,
             make_float4(scaled_and_capped(x.x, p), scaled_and_capped(x.y, p),
                         scaled_and_capped(x.z, p), scaled_and_capped(x.w, p)));
}

// Rows may be many more than the 65535 blocks that a grid has in its second direction.
dim3 grid_of(int rows, int cols) {
  return dim3(static_cast<unsigned>(rows),
              static_cast<unsigned>((cols + kColsPerBlock - 1) / kColsPerBlock));
}

void gather(StreamHandle stream, const DeviceGather& g) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(g.x) | reinterpret_cast<uintptr_t>(g.y) |
                        static_cast<uint64_t>(g.x_stride | g.y_stride | g.row_bytes);
  if (bits % 2 != 0)
    throw_error(ErrorCode::internal, "gather: got rows of ", g.row_bytes, " bytes, strides ",
                g.x_stride, " and ", g.y_stride, ", expected multiples of 2");
  const dim3 grid(static_cast<unsigned>(g.count));
  if (bits % 16 == 0)
    launch<gather_rows<uint4>>(stream, grid, kThreads, 0, g);
  else
    launch<gather_rows<uint16_t>>(stream, grid, kThreads, 0, g);
}

void scaled_add(StreamHandle stream, const DeviceScaledAdd& a) {
  launch<scaled_add_rows>(stream, grid_of(a.rows, a.cols), kThreads, 0, a);
}

void scale_and_cap(StreamHandle stream, const DeviceScaleCap& s) {
  if (!(s.cap >= 0))
    throw_error(ErrorCode::internal, "scale_and_cap: cap is ", s.cap, ", expected 0 or more");
  launch<scale_and_cap_rows>(stream, grid_of(s.rows, s.cols), kThreads, 0, s);
}

}  // namespace

extern const RowsCuda kRowsCuda;
const RowsCuda kRowsCuda{gather, scaled_add, scale_and_cap};

}  // namespace turbomind::TM_CUDA_NS
