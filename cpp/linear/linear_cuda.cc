#include "linear/linear_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "core/tensor.h"
#include "cuda/cublaslt.h"
#include "cuda/dispatch.h"

namespace turbomind {

TM_GPU_TABLE(LinearCuda, kLinearCuda, linear_kernels)
TM_GPU_TABLE(GemmCuda, kGemmCuda, gemm_kernels)

namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// ---- checks

void expect(bool ok, const char* what, int64_t seen, const char* expected) {
  if (ok) return;
  throw_error(ErrorCode::internal, "linear on a GPU: ", what, " is ", seen, ", expected ",
              expected);
}

bool aligned(const void* p, size_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

void check(const DeviceProduct& p) {
  const bool gated = is_gated(p.epilogue);
  expect(p.dtype != DType::f32, "dtype", static_cast<int>(p.dtype), "bfloat16 or float16");
  expect(p.m >= 0, "m", p.m, "0 or more");
  expect(p.n > 0 && (!gated || p.n % 32 == 0), "n", p.n,
         gated ? "a positive multiple of 32" : "a positive number");
  expect(p.k_padded > 0 && p.k_padded % kChunk == 0, "k_padded", p.k_padded,
         "a positive multiple of 32");
  expect(p.x_stride >= p.k_padded && p.x_stride % 8 == 0, "x_stride", p.x_stride,
         "a multiple of 8, at least k_padded");
  expect(gated ? round_up(p.y_cols, 16) == p.n / 2 : p.y_cols == p.n, "y_cols", p.y_cols,
         gated ? "n / 2, less at most 15" : "n");
  expect(p.y_zero_end <= p.y_stride && p.y_stride >= p.y_cols, "y_stride", p.y_stride,
         "at least y_cols and y_zero_end");
  expect(p.epilogue != Epilogue::add || !p.y_16bit, "y_16bit", p.y_16bit,
         "0 (float32) for Epilogue::add");
  expect(p.addend == nullptr || p.addend_stride >= p.n, "addend_stride", p.addend_stride,
         "at least n");
  expect(p.w != nullptr && aligned(p.w, 16), "w", reinterpret_cast<intptr_t>(p.w),
         "a multiple of 16");
  expect(p.x != nullptr && aligned(p.x, 16), "x", reinterpret_cast<intptr_t>(p.x),
         "a multiple of 16");
  expect(p.y != nullptr, "y", 0, "device memory");
}

// ---- the skinny kernel's launch

constexpr int kRowTileChoices[] = {1, 2, 4};

int skinny_stages(int row_tiles, int tile_groups, size_t shared_per_block) {
  const size_t sums = skinny_sum_bytes(tile_groups);
  if (shared_per_block < sums) return 0;
  const size_t fit = (shared_per_block - sums) / skinny_stage_bytes(row_tiles, tile_groups);
  return static_cast<int>(std::min<size_t>(fit, most_skinny_stages(row_tiles, tile_groups)));
}

// ---- traffic

// Equal to block_groups of linear_cuda.cu.
GroupRange group_range(int groups, int unit, int block, int blocks) {
  const int64_t units = ceil_div(groups, unit);
  return {static_cast<int>(units * block / blocks) * unit,
          std::min(static_cast<int>(units * (block + 1) / blocks) * unit, groups)};
}

// Bytes that the epilogues load beside the sums, and bytes that they store.
LinearTraffic epilogue_traffic(const DeviceProduct& p) {
  const int64_t sums = int64_t{p.m} * p.y_cols * (is_gated(p.epilogue) ? 2 : 1);
  const int64_t terms = (p.bias != nullptr) + (p.addend != nullptr);
  const int64_t added = p.epilogue == Epilogue::add ? int64_t{p.m} * p.n : 0;
  const int64_t columns = p.y_cols + std::max(0, p.y_zero_end - p.y_cols);
  return {(sums * terms + added) * 4, p.m * columns * (p.y_16bit ? 2 : 4)};
}

int64_t matrix_bytes(int64_t rows, int64_t k_padded) {
  return rows * k_padded * 2;
}

// ---- cuBLASLt

bool has_terms(const DeviceProduct& p) {
  return p.bias != nullptr || p.addend != nullptr;
}

// Sums of 16 bits with more to add would be rounded twice, but for gates and ups, where the usual
// fast path rounds too.
bool fits_cublaslt(const DeviceLinear& l, const DeviceProduct& p) {
  if (l.cublaslt == nullptr) return false;
  if (is_gated(p.epilogue)) return l.scratch_bytes >= gate_scratch_bytes(1, p.n);
  return !p.y_16bit || !has_terms(p);
}

CublasLtProduct plain_product(const DeviceProduct& p) {
  CublasLtProduct c;
  c.x = p.x, c.w = p.w, c.y = p.y;
  c.m = p.m, c.n = p.n, c.k = p.k_padded;
  c.x_stride = p.x_stride, c.y_stride = p.y_stride;
  c.dtype = p.dtype;
  c.y_dtype = p.y_16bit ? p.dtype : DType::f32;
  c.add = p.epilogue == Epilogue::add;
  return c;
}

// Rows [begin, begin + rows) of p.
DeviceProduct rows_of(DeviceProduct p, int64_t begin, int64_t rows) {
  p.x = static_cast<const uint8_t*>(p.x) + begin * p.x_stride * 2;
  p.y = static_cast<uint8_t*>(p.y) + begin * p.y_stride * (p.y_16bit ? 2 : 4);
  if (p.addend != nullptr) p.addend += begin * p.addend_stride;
  p.m = static_cast<int32_t>(rows);
  return p;
}

// Returns how many rows are done. Rows that the library refuses are left to the caller.
int64_t gated_by_cublaslt(const DeviceLinear& l, const LinearCuda& kernels, StreamHandle stream,
                          const DeviceProduct& p) {
  const int64_t fit = static_cast<int64_t>(l.scratch_bytes / gate_scratch_bytes(1, p.n));
  const int64_t most = fit >= kGemmRows ? fit / kGemmRows * kGemmRows : fit;
  int64_t done = 0;
  while (done < p.m) {
    const DeviceProduct part = rows_of(p, done, std::min(most, p.m - done));
    CublasLtProduct sums = plain_product(part);
    sums.y = l.scratch;
    sums.y_dtype = p.dtype;
    sums.y_stride = p.n;
    if (!l.cublaslt->multiply(stream, sums)) return done;
    kernels.gate(stream, part, l.scratch);
    done += part.m;
  }
  return done;
}

int64_t rows_by_cublaslt(const DeviceLinear& l, const LinearCuda& kernels, StreamHandle stream,
                         const DeviceProduct& p) {
  if (is_gated(p.epilogue)) return gated_by_cublaslt(l, kernels, stream, p);
  if (!l.cublaslt->multiply(stream, plain_product(p))) return 0;
  if (has_terms(p) || p.y_zero_end > p.y_cols) kernels.add_terms(stream, p);
  return p.m;
}

void run_own(const DeviceLinear& l, StreamHandle stream, const DeviceProduct& p, LinearPath path) {
  if (path == LinearPath::skinny) {
    linear_kernels(l.kind).skinny(stream, p, skinny_plan(p, l.multiprocessors, l.shared_per_block));
  } else {
    gemm_kernels(l.kind).run(stream, p, gemm_columns(p, l.multiprocessors));
  }
}

// Weights that can have rows.
int64_t most_used(const DeviceGroups& g) {
  return std::min<int64_t>(g.count, g.all.m);
}

}  // namespace

LinearPath linear_path(int64_t m, bool deterministic, bool cublaslt, int skinny_rows) {
  const bool library = cublaslt && !deterministic;
  if (m <= std::min(skinny_rows, library ? kSkinnyRows : kMaxSkinnyRows)) {
    return LinearPath::skinny;
  }
  return library ? LinearPath::cublaslt : LinearPath::gemm;
}

int skinny_rows(size_t shared_per_block) {
  int rows = 0;
  for (const int tiles : kRowTileChoices) {
    if (skinny_stages(tiles, kTileGroups, shared_per_block) >= 2) rows = 16 * tiles;
  }
  return rows;
}

SkinnyPlan skinny_plan(const DeviceProduct& p, int multiprocessors, size_t shared_per_block) {
  SkinnyPlan plan;
  plan.unit = is_gated(p.epilogue) ? 4 : 1;
  const int64_t units = ceil_div(ceil_div(p.n, kGroup), plan.unit);
  plan.blocks = static_cast<int>(std::min<int64_t>(units, multiprocessors));
  const int64_t most_groups = ceil_div(units, plan.blocks) * plan.unit;
  plan.tile_groups = p.m <= 16 && most_groups <= kFewGroups ? kFewGroups : kTileGroups;
  for (const int tiles : kRowTileChoices) {
    if (p.m > 16 * tiles) continue;
    plan.stages = skinny_stages(tiles, plan.tile_groups, shared_per_block);
    if (plan.stages >= 2) plan.row_tiles = tiles;
    break;
  }
  plan.shared_bytes = skinny_sum_bytes(plan.tile_groups) +
                      plan.stages * skinny_stage_bytes(plan.row_tiles, plan.tile_groups);
  return plan;
}

int gemm_columns(const DeviceProduct& p, int multiprocessors) {
  return ceil_div(p.m, kGemmRows) * ceil_div(p.n, 128) < multiprocessors ? 64 : 128;
}

LinearTraffic skinny_traffic(const DeviceProduct& p, const SkinnyPlan& plan) {
  const int groups = static_cast<int>(ceil_div(p.n, kGroup));
  int64_t tiles = 0;
  for (int b = 0; b < plan.blocks; ++b) {
    const GroupRange range = group_range(groups, plan.unit, b, plan.blocks);
    tiles += ceil_div(range.end - range.begin, plan.tile_groups);
  }
  LinearTraffic t = epilogue_traffic(p);
  t.loaded += matrix_bytes(p.n, p.k_padded) + tiles * matrix_bytes(p.m, p.k_padded);
  return t;
}

LinearTraffic gemm_traffic(const DeviceProduct& p, int columns) {
  LinearTraffic t = epilogue_traffic(p);
  t.loaded += ceil_div(p.m, kGemmRows) * matrix_bytes(p.n, p.k_padded) +
              ceil_div(p.n, columns) * matrix_bytes(p.m, p.k_padded);
  return t;
}

int64_t linear_bytes(const DeviceProduct& p) {
  const LinearTraffic t = epilogue_traffic(p);
  return matrix_bytes(p.n, p.k_padded) + matrix_bytes(p.m, p.k_padded) + t.loaded + t.stored;
}

void linear(const DeviceLinear& l, StreamHandle stream, const DeviceProduct& p) {
  check(p);
  if (p.m == 0) return;
  const int rows = skinny_rows(l.shared_per_block);
  LinearPath path = linear_path(p.m, l.deterministic, fits_cublaslt(l, p), rows);
  int64_t done = 0;
  if (path == LinearPath::cublaslt) {
    done = rows_by_cublaslt(l, linear_kernels(l.kind), stream, p);
    if (done == p.m) return;
    path = linear_path(p.m - done, l.deterministic, false, rows);
  }
  run_own(l, stream, rows_of(p, done, p.m - done), path);
}

void linear_groups(const DeviceLinear& l, StreamHandle stream, const DeviceGroups& g) {
  check(g.all);
  expect(g.begin != nullptr && g.count > 0, "count", g.count, "at least one weight");
  expect(g.w_stride % 16 == 0, "w_stride", g.w_stride, "a multiple of 16");
  if (g.all.m == 0) return;
  DeviceProduct widest = g.all;
  widest.m = std::min(g.most_rows, g.all.m);
  const int own = skinny_rows(l.shared_per_block);
  if (linear_path(widest.m, true, false, own) == LinearPath::gemm) {
    gemm_kernels(l.kind).run_groups(stream, g);
    return;
  }
  const auto share = static_cast<int>(ceil_div(l.multiprocessors, most_used(g)));
  linear_kernels(l.kind).skinny_groups(stream, g, skinny_plan(widest, share, l.shared_per_block));
}

}  // namespace turbomind
