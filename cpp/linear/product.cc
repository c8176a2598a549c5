#include "linear/product.h"

#include <algorithm>
#include <cstring>

#include "core/memory.h"
#include "linear/linear_split.h"

namespace turbomind {

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
struct ActivationScratch;  // of the thread that calls run_products, read by all workers
struct RowScratch;         // of each worker: a row of x as float32
struct SumScratch;         // of each worker

// ---- x as float32 or bfloat16 ----

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

// What a kernel cannot read of x as it is, and where the copy goes.
struct FloatCopy {
  int64_t begin = 0, rows = 0;  // of x, padded; none: x is read as it is
  int64_t stride = 0;           // bytes
  bool all = false;             // not only the rows after the last whole tile

  int64_t bytes() const { return rows * stride; }
};

FloatCopy float_copy(const LinearKernel& kernel, const Mat& x, int64_t k) {
  const bool bf16 = kernel.x_type == XType::bf16;
  const int64_t full = x.rows / 16 * 16;
  const int64_t x_stride = x.stride * static_cast<int64_t>(dtype_bytes(x.dtype));
  const bool tail = kernel.whole_tiles && full < x.rows;
  FloatCopy copy;
  // 4 KiB apart, the 16 rows of a tile would meet in one set of the first-level cache.
  copy.all = (x.dtype == DType::bf16) != bf16 || (kernel.whole_tiles && x_stride % 4096 == 0);
  if (!copy.all && !tail) return copy;
  copy.begin = copy.all ? 0 : full;
  copy.rows = tail ? full + 16 - copy.begin : x.rows - copy.begin;
  copy.stride = activation_stride(k) * (bf16 ? 2 : 4);
  return copy;
}

// Points the job at x, or at its copy at `dst`, which it makes.
void prepare_float_x(ThreadPool& pool, const LinearKernel& kernel, const Mat& x, int64_t k,
                     const FloatCopy& copy, uint8_t* dst, LinearJob& job) {
  job.x = static_cast<const uint8_t*>(x.data);
  job.x_stride = x.stride * static_cast<int64_t>(dtype_bytes(x.dtype));
  job.x_tail_begin = x.rows;
  if (copy.rows == 0) return;
  convert_rows(pool, x, copy.begin, copy.rows, k, kernel.x_type == XType::bf16, dst, copy.stride);
  if (copy.all) {
    job.x = dst;
    job.x_stride = copy.stride;
  }
  const int64_t full = x.rows / 16 * 16;
  if (kernel.whole_tiles && full < x.rows) {
    job.x_tail = dst + (full - copy.begin) * copy.stride;
    job.x_tail_begin = full;
    job.x_tail_stride = copy.stride;
  }
}

// ---- x as codes ----

// Returns row `row` of x as float32, its columns in the order of the weight's codes.
const float* float_row(const Mat& x, int64_t row, int64_t k, const int32_t* columns) {
  if (columns == nullptr && x.dtype == DType::f32) return x.f32(row);
  auto* scratch = reinterpret_cast<float*>(thread_scratch<RowScratch>(k * sizeof(float)));
  for (int64_t i = 0; i < k; ++i) {
    const int64_t c = columns ? columns[i] : i;
    scratch[i] = x.dtype == DType::f32 ? x.f32(row)[c] : bf16_to_f32(x.u16(row)[c]);
  }
  return scratch;
}

// The codes of x and, after them, its groups of K.
struct CodeCopy {
  int64_t rows = 0;
  int64_t stride = 0;  // bytes
  int64_t groups = 0;  // of a row

  int64_t bytes() const {
    return round_up(rows * (stride + groups * static_cast<int64_t>(sizeof(XGroup))), 64);
  }
};

CodeCopy code_copy(const LinearJob& job, int64_t rows) {
  const int64_t padded = job.k_blocks * job.codes.k_block();
  const int64_t lines = round_up(padded, 64) / 64;
  // An odd number of lines, or twice one, spreads rows over the cache's sets.
  return {rows, (lines % 4 == 0 ? lines + 1 : lines) * 64, padded / job.codes.group};
}

// ---- the product ----

void set_result(LinearJob& job, const LinearWeight& w, const Mat& y, const LinearArgs& args) {
  job.w = w.data;
  job.n = w.n;
  const int64_t first = args.first_col;
  job.y = y.row<uint8_t>(0) + first * static_cast<int64_t>(dtype_bytes(y.dtype));
  job.y_stride = y.stride;
  job.y_cols = is_gated(args.epilogue) ? y.cols : w.n;
  const bool last = first + job.y_cols == y.cols;  // padding follows
  job.y_zero_end = last ? std::min(padded_cols(y.cols), y.stride) - first : job.y_cols;
  job.y_bf16 = y.dtype == DType::bf16;
  job.bias = args.bias ? args.bias + first : nullptr;
  if (args.addend != nullptr) {
    job.addend = args.addend->f32(0) + first;
    job.addend_stride = args.addend->stride;
  }
  job.epilogue = args.epilogue;
}

// A product as pieces that workers compute in any order.
struct Pieces {
  LinearKernel kernel;
  LinearJob job;
  Mat x;
  int64_t k = 0;
  FloatCopy floats;
  CodeCopy codes;
  Split split;
  int64_t rows = 0, panels = 0;
  int64_t first = 0;      // number of its first piece among those of all products
  int64_t first_row = 0;  // of x among the rows of all products

  Pieces(const Context& ctx, const Product& p)
      : kernel(*p.kernel),
        job(p.job),
        x(p.x),
        k(p.w->k),
        rows(p.x.rows),
        panels(round_up(p.w->n, kPanel) / kPanel) {
    if (rounds())
      codes = code_copy(job, rows);
    else
      floats = float_copy(kernel, x, k);
    set_result(job, *p.w, p.y, p.args);
    if (kernel.ordered) {
      job.order = ctx.tile_order;
      kernel.chunk_k_blocks = ctx.tile_order.chunk_k_blocks;
    }
    job.order.chunk_k_blocks = kernel.chunk_k_blocks;
    split = split_linear(kernel, rows, panels, job.k_blocks, p.args.epilogue, ctx.pool.size());
  }
  int64_t end() const { return first + split.count(); }
  int64_t end_row() const { return first_row + rows; }
  bool rounds() const { return kernel.x_type == XType::int8; }
  int64_t copied_bytes() const { return rounds() ? codes.bytes() : floats.bytes(); }

  // Points the job at x, or at its copy at `dst`, which it makes but for codes: see round_row.
  void prepare_x(ThreadPool& pool, uint8_t* dst) {
    if (!rounds()) return prepare_float_x(pool, kernel, x, k, floats, dst, job);
    job.x = dst;
    job.x_stride = codes.stride;
    job.x_groups = reinterpret_cast<XGroup*>(dst + rows * codes.stride);
    job.x_groups_stride = codes.groups;
  }
  // Rounds a row of x to int8 per group of K, in the memory that prepare_x() had.
  void round_row(int64_t row) const {
    uint8_t* dst = const_cast<uint8_t*>(job.x);
    auto* groups = reinterpret_cast<XGroup*>(dst + rows * codes.stride);
    kernel.round_row(job.codes, float_row(x, row, k, job.columns), k,
                     reinterpret_cast<int8_t*>(dst + row * codes.stride),
                     groups + row * codes.groups);
  }
  // `next`: the piece that the worker most likely takes after this one.
  void compute(int64_t piece, int64_t next) const {
    LinearPiece p = piece_of(split, piece - first, rows, panels);
    if (next < end()) p.next_panel = piece_of(split, next - first, rows, panels).panel_begin;
    const auto floats = static_cast<size_t>(linear_scratch_floats(kernel, p));
    kernel.run(job, p, reinterpret_cast<float*>(thread_scratch<SumScratch>(floats * 4)));
  }
};

void round_rows(ThreadPool& pool, const std::vector<Pieces>& products) {
  pool.parallel_for(products.back().end_row(), 16, [&](int64_t begin, int64_t end, int) {
    auto p = std::upper_bound(products.begin(), products.end(), begin,
                              [](int64_t row, const Pieces& each) { return row < each.end_row(); });
    for (int64_t row = begin; row < end; ++row) {
      while (row >= p->end_row()) ++p;
      p->round_row(row - p->first_row);
    }
  });
}

void compute(ThreadPool& pool, const std::vector<Pieces>& products) {
  const int64_t total = products.back().end();
  int64_t most_rows = 0;
  for (const Pieces& p : products) most_rows = std::max(most_rows, p.rows);
  const auto product_of = [&](int64_t piece) -> const Pieces& {
    return *std::upper_bound(products.begin(), products.end(), piece,
                             [](int64_t p, const Pieces& each) { return p < each.end(); });
  };
  if (most_rows > kFewRows) {
    pool.parallel_for(total, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) product_of(i).compute(i, total);
    });
    return;
  }
  pool.parallel_ranges(total, [&](int64_t i, int64_t range_end, int) {
    product_of(i).compute(i, i + 1 < range_end ? i + 1 : total);
  });
}

}  // namespace

std::vector<Product>& group_products(const WeightGroup& w, const int32_t* begin, const Mat& x,
                                     const Mat& y, Epilogue epilogue) {
  thread_local std::vector<Product> products;  // keeps its memory from step to step
  products.clear();
  for (size_t i = 0; i < w.weights.size(); ++i) {
    const int64_t first = begin[i], rows = begin[i + 1] - first;
    if (rows == 0) continue;
    products.push_back({.w = &w.weights[i],
                        .x = x.some_rows(first, rows),
                        .y = y.some_rows(first, rows),
                        .args = {.bias = w.bias(i), .epilogue = epilogue}});
  }
  return products;
}

void run_products(Context& ctx, std::span<const Product> products) {
  thread_local std::vector<Pieces> all;  // keeps its memory from step to step
  all.clear();
  int64_t first = 0, first_row = 0, bytes = 0;
  for (const Product& p : products) {
    Pieces& pieces = all.emplace_back(ctx, p);
    pieces.first = first;
    pieces.first_row = first_row;
    first = pieces.end();
    first_row = pieces.end_row();
    bytes += pieces.copied_bytes();
  }
  if (all.empty()) return;
  uint8_t* dst = bytes ? thread_scratch<ActivationScratch>(bytes) : nullptr;
  for (Pieces& pieces : all) {
    pieces.prepare_x(ctx.pool, dst);
    dst += pieces.copied_bytes();
  }
  if (all.front().rounds()) round_rows(ctx.pool, all);
  compute(ctx.pool, all);
}

}  // namespace turbomind
