#include "linear/dense_format.h"

#include <algorithm>
#include <cstring>

#include "cpu/isa_dispatch.h"
#include "linear/product.h"
#include "linear/row_source.h"

namespace turbomind {

TM_KERNEL_TABLE(DenseKernels, dense_kernel_table)

const DenseKernels& dense_kernels(Isa isa) {
  return dense_kernel_table(isa);
}

namespace {

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

}  // namespace

size_t DenseFormat::packed_bytes(int64_t n, int64_t k) const {
  return static_cast<size_t>(round_up(n, kPanel)) * padded_cols(k) * dtype_bytes(dtype_);
}

void DenseFormat::pack(ThreadPool& pool, const std::vector<RowSegment>& segments, int64_t n,
                       int64_t k, uint8_t* dst) const {
  const SourceRows source(segments, n, k);
  const size_t panel_bytes = packed_bytes(kPanel, k);
  pool.parallel_for(round_up(n, kPanel) / kPanel, 4, [&](int64_t begin, int64_t end, int) {
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
  const Product product{&kernel(ctx.isa, x.rows), job(w.k), &w, x, y, args};
  run_products(ctx, {&product, 1});
}

void DenseFormat::matmul_group(Context& ctx, const WeightGroup& w, const int32_t* begin, int64_t,
                               const Mat& x, const Mat& y, Epilogue epilogue) const {
  std::vector<Product>& products = group_products(w, begin, x, y, epilogue);
  for (Product& p : products) p.kernel = &kernel(ctx.isa, p.x.rows), p.job = job(p.w->k);
  run_products(ctx, products);
}

LinearJob DenseFormat::job(int64_t k) const {
  LinearJob job;
  job.panel_bytes = static_cast<int64_t>(packed_bytes(kPanel, k));
  job.k_block_bytes = kKBlock * kPanel * static_cast<int64_t>(dtype_bytes(dtype_));
  job.k_blocks = padded_cols(k) / kKBlock;
  return job;
}

}  // namespace turbomind
