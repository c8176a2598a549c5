#include "linear/dense_format.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/memory.h"
#include "cpu/isa_dispatch.h"
#include "linear/linear_split.h"
#include "linear/row_source.h"

namespace turbomind {

TM_KERNEL_TABLE(DenseKernels, dense_kernel_table)

const DenseKernels& dense_kernels(Isa isa) {
  return dense_kernel_table(isa);
}

namespace {

// Scratch of the calling thread: grows to the largest product seen, then stays.
template <class Tag>
uint8_t* thread_scratch(size_t bytes) {
  thread_local HugeBuffer buffer;
  if (buffer.size() < bytes) {
    buffer = HugeBuffer();  // the old one goes first
    buffer = HugeBuffer(bytes);
  }
  return buffer.data();
}
struct ActivationScratch;  // of the thread that calls matmul, read by all workers
struct SumScratch;         // of each worker

// ---- packing ----

template <typename T>
T read_at(const uint8_t* p, int64_t i) {
  T v;
  std::memcpy(&v, p + i * sizeof(T), sizeof(T));
  return v;
}

// One K block of a panel: 16 rows of 32 elements -> [32 / pair][16][pair], in units of a pair.
template <typename Unit>
void transpose_block(const Unit* rows, Unit* dst, int64_t units) {
  for (int64_t u = 0; u < units; ++u) {
    for (int64_t r = 0; r < kPanel; ++r) dst[u * kPanel + r] = rows[r * units + u];
  }
}

void pack_panel(const SourceRows& source, int64_t first, int64_t n, DType dtype, int pair,
                int64_t k, uint8_t* dst) {
  const size_t element = dtype_bytes(dtype), row_bytes = kKBlock * element;
  alignas(64) uint8_t rows[kPanel * kKBlock * 4] = {};
  for (int64_t k0 = 0; k0 < k; k0 += kKBlock) {
    const int64_t count = std::min(kKBlock, k - k0);
    for (int64_t r = 0; r < std::min(kPanel, n - first); ++r)
      convert_block(source.row(first + r), source.dtype(first + r), k0, count, dtype,
                    rows + r * row_bytes);
    uint8_t* out = dst + k0 * kPanel * element;
    if (element * pair == 4) {
      transpose_block(reinterpret_cast<uint32_t*>(rows), reinterpret_cast<uint32_t*>(out),
                      kKBlock / pair);
    } else {
      transpose_block(reinterpret_cast<uint16_t*>(rows), reinterpret_cast<uint16_t*>(out), kKBlock);
    }
  }
}

// ---- activations ----

void convert_row(const Mat& x, int64_t row, int64_t k, bool to_bf16, uint8_t* dst) {
  const bool from_bf16 = x.dtype == DType::bf16;
  if (from_bf16 == to_bf16) {
    std::memcpy(dst, x.row<uint8_t>(0) + row * x.stride * dtype_bytes(x.dtype),
                k * dtype_bytes(x.dtype));
  } else if (to_bf16) {
    const float* s = x.f32(row);
    for (int64_t i = 0; i < k; ++i) reinterpret_cast<uint16_t*>(dst)[i] = f32_to_bf16(s[i]);
  } else {
    const uint16_t* s = x.u16(row);
    for (int64_t i = 0; i < k; ++i) reinterpret_cast<float*>(dst)[i] = bf16_to_f32(s[i]);
  }
}

// Rows [begin, x.rows) in the kernel's type, 64-byte aligned, their columns and `padded_rows` in
// all padded with zeros.
void convert_rows(ThreadPool& pool, const Mat& x, int64_t begin, int64_t padded_rows, int64_t k,
                  bool to_bf16, uint8_t* dst, int64_t stride) {
  const int64_t used = k * (to_bf16 ? 2 : 4);
  pool.parallel_for(padded_rows, 16, [&](int64_t lo, int64_t hi, int) {
    for (int64_t r = lo; r < hi; ++r) {
      const bool real = begin + r < x.rows;
      if (real) convert_row(x, begin + r, k, to_bf16, dst + r * stride);
      std::memset(dst + r * stride + (real ? used : 0), 0, stride - (real ? used : 0));
    }
  });
}

// Points the job at x, or at a copy where the kernel cannot read it as it is.
void prepare_x(ThreadPool& pool, const LinearKernel& kernel, const Mat& x, int64_t k,
               LinearJob& job) {
  const int64_t element = kernel.bf16_x ? 2 : 4, full = x.rows / 16 * 16;
  const bool tail = kernel.whole_tiles && full < x.rows;
  job.x = static_cast<const uint8_t*>(x.data);
  job.x_stride = x.stride * static_cast<int64_t>(dtype_bytes(x.dtype));
  job.x_tail_begin = x.rows;
  // 4 KiB apart, the 16 rows of a tile would meet in one set of the first-level cache.
  const bool copy =
      (x.dtype == DType::bf16) != kernel.bf16_x || (kernel.whole_tiles && job.x_stride % 4096 == 0);
  if (!copy && !tail) return;
  const int64_t begin = copy ? 0 : full;
  const int64_t rows = tail ? full + 16 - begin : x.rows - begin;
  const int64_t stride = activation_stride(k) * element;
  uint8_t* dst = thread_scratch<ActivationScratch>(stride * rows);
  convert_rows(pool, x, begin, rows, k, kernel.bf16_x, dst, stride);
  if (copy) {
    job.x = dst;
    job.x_stride = stride;
  }
  if (tail) {
    job.x_tail = dst + (full - begin) * stride;
    job.x_tail_begin = full;
    job.x_tail_stride = stride;
  }
}

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

LinearJob make_job(const LinearWeight& w, const Mat& y, const LinearArgs& args,
                   int64_t panel_bytes) {
  LinearJob job;
  job.w = w.data;
  job.panel_bytes = panel_bytes;
  job.k_blocks = padded_cols(w.k) / kKBlock;
  job.n = w.n;
  job.y = y.data;
  job.y_stride = y.stride;
  job.y_cols = y.cols;
  job.y_zero_end = std::min(padded_cols(y.cols), y.stride);
  job.y_bf16 = y.dtype == DType::bf16;
  job.bias = args.bias;
  if (args.addend != nullptr) {
    job.addend = args.addend->f32(0);
    job.addend_stride = args.addend->stride;
  }
  job.epilogue = args.epilogue;
  return job;
}

}  // namespace

size_t DenseFormat::packed_bytes(int64_t n, int64_t k) const {
  return static_cast<size_t>(round_up(n, kPanel)) * padded_cols(k) * dtype_bytes(dtype_);
}

void DenseFormat::pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t n,
                       int64_t k, uint8_t* dst) const {
  const SourceRows source(segments, n, k);
  const size_t panel_bytes = packed_bytes(kPanel, k);
  pool.parallel_for(ceil_div(n, kPanel), 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t p = begin; p < end; ++p) {
      pack_panel(source, p * kPanel, n, dtype_, pair_, k, dst + p * panel_bytes);
    }
  });
}

void DenseFormat::unpack_row(const LinearWeight& w, int64_t row, float* out) const {
  const uint8_t* panel = w.data + row / kPanel * packed_bytes(kPanel, w.k);
  const int64_t r = row % kPanel;
  for (int64_t i = 0; i < w.k; ++i) {
    const int64_t at = (i / pair_ * kPanel + r) * pair_ + i % pair_;
    if (dtype_ == DType::f32)
      out[i] = read_at<float>(panel, at);
    else if (dtype_ == DType::f16)
      out[i] = f16_to_f32(read_at<uint16_t>(panel, at));
    else
      out[i] = bf16_to_f32(read_at<uint16_t>(panel, at));
  }
}

void DenseFormat::matmul(Context& ctx, const LinearWeight& w, const Mat& x, const Mat& y,
                         const LinearArgs& args) const {
  if (x.rows == 0) return;
  LinearKernel kern = kernel(ctx.isa, x.rows);
  LinearJob job = make_job(w, y, args, static_cast<int64_t>(packed_bytes(kPanel, w.k)));
  if (kern.ordered) {
    job.order = ctx.tile_order;
    kern.chunk_k_blocks = ctx.tile_order.chunk_k_blocks;
  }
  job.order.chunk_k_blocks = kern.chunk_k_blocks;
  prepare_x(ctx.pool, kern, x, w.k, job);
  const int64_t panels = ceil_div(w.n, kPanel);
  const Split s = split_linear(kern, x.rows, panels, job.k_blocks, args.epilogue, ctx.pool.size());
  const auto compute = [&](int64_t piece, int64_t next_panel) {
    LinearPiece p = piece_of(s, piece, x.rows, panels);
    p.next_panel = next_panel;
    const size_t floats = static_cast<size_t>(linear_scratch_floats(kern, p));
    kern.run(job, p, reinterpret_cast<float*>(thread_scratch<SumScratch>(floats * 4)));
  };
  if (x.rows > kFewRows) {
    ctx.pool.parallel_for(s.count(), 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) compute(i, -1);
    });
    return;
  }
  ctx.pool.parallel_ranges(s.count(), [&](int64_t i, int64_t range_end, int) {
    compute(i, i + 1 < range_end ? piece_of(s, i + 1, x.rows, panels).panel_begin : -1);
  });
}

}  // namespace turbomind
