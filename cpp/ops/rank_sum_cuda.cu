// An exchange is the beginning of a kernel. Every block tells the other ranks that this one has
// come, so that no block needs another one to run first, and waits for them.
//
// What they have stored is then read by load(), a plain coherent ld.global. Other devices write
// that memory again and again, so ld.global.nc would not do (tests/cpp/test_cuda_build.py looks for
// it in the machine code). The acquiring loads of the wait and the barrier after it order the loads
// of the whole block, and no line of the first-level cache from before the wait is used.
#include "ops/rank_sum_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "cuda/device_wait.h"
#include "cuda/four_cuda.h"
#include "cuda/kernel.h"
#include "ops/norm_row_cuda.h"

namespace turbomind::TM_CUDA_NS {
namespace {

constexpr int kThreads = kNormThreads;
constexpr int kColsPerBlock = 4 * kThreads;
constexpr int kInFlight = 3;  // parts of ranks that a thread loads at once, after the first one

// Tells the other ranks that this one has come and waits for them. The threads of one warp call it.
TM_DEVICE void meet_in_warp(const DeviceExchange& e) {
  const uint32_t count = load(e.base) + e.number;
  const int rank = lane_index();
  if (rank == 0) post_count(e.counters[e.own], count);
  __syncwarp();
  const bool came = rank >= e.ranks || rank == e.own ||
                    wait_for_count(e.counters[rank], count, e.stop, e.limit_ns);
  const unsigned late = __ballot_sync(kAllLanes, !came);
  // Whoever has set *stop has also told why.
  if (rank != 0 || late == 0 || load_system(e.stop) != 0) return;
  if (load_system(e.missing) == 0)
    store(e.missing, static_cast<uint32_t>(__ffs(static_cast<int>(late))));
  post_count(e.stop, 1);  // visible after *missing
}
static_assert(kMostGpuRanks <= kWarp);

// All threads of the block call it, before the block stores anything. After a wait that failed the
// kernel ends as usual, with results that do not matter.
TM_DEVICE void meet_ranks(const DeviceExchange& e) {
  if (!e.waits) return;
  if (warp_index() == 0) meet_in_warp(e);
  __syncthreads();
}

// The parts come from the memory of other devices, and at batch 1 the time is that of one round
// trip to them. So a thread holds some pieces of four columns of its row, at columns(j), loads
// those of several ranks before it adds the first, and stores nothing before all are loaded.
// `Columns` returns a column from p.cols on where the thread has no piece.
template <int kPieces, typename Columns>
TM_DEVICE void load_pieces(const float* row, int cols, Columns&& columns, float4 (&v)[kPieces]) {
#pragma unroll
  for (int j = 0; j < kPieces; ++j)
    if (columns(j) < cols) v[j] = load_four(row, columns(j), cols);
}

// v = the sum in the order of the ranks, from memory that all of them have filled.
template <int kPieces, typename Columns>
TM_DEVICE void sum_pieces(const DeviceRankSum& p, Columns&& columns, float4 (&v)[kPieces]) {
  const int ranks = p.exchange.ranks;
  const auto load_part = [&](int r, float4(&to)[kPieces]) {
    load_pieces(p.parts[r] + blockIdx.x * p.part_stride, p.cols, columns, to);
  };
  load_part(0, v);
  for (int begin = 1; begin < ranks; begin += kInFlight) {
    float4 next[kInFlight][kPieces] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (begin + i < ranks) load_part(begin + i, next[i]);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (begin + i >= ranks) break;
#pragma unroll
      for (int j = 0; j < kPieces; ++j)
        v[j] = make_float4(v[j].x + next[i][j].x, v[j].y + next[i][j].y, v[j].z + next[i][j].z,
                           v[j].w + next[i][j].w);
    }
  }
}

TM_DEVICE float* x_row(const DeviceRankSum& p) {
  return p.x + blockIdx.x * p.x_stride;
}

// Loads what the sum is added to, which no other rank writes: before the wait for them.
template <int kPieces, typename Columns>
TM_DEVICE void load_x(const DeviceRankSum& p, Columns&& columns, float4 (&x)[kPieces]) {
  if (p.add) load_pieces(x_row(p), p.cols, columns, x);
}

// Updates the pieces of x, which were loaded, and returns the new ones in v, which is zero.
template <int kPieces, typename Columns>
TM_DEVICE void update_pieces(const DeviceRankSum& p, Columns&& columns, const float4 (&x)[kPieces],
                             float4 (&v)[kPieces]) {
  sum_pieces(p, columns, v);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    if (p.add)
      v[j] = make_float4(fma(p.scale, v[j].x, x[j].x), fma(p.scale, v[j].y, x[j].y),
                         fma(p.scale, v[j].z, x[j].z), fma(p.scale, v[j].w, x[j].w));
    else
      v[j] = make_float4(p.scale * v[j].x, p.scale * v[j].y, p.scale * v[j].z, p.scale * v[j].w);
    if (columns(j) < p.cols) store_four(x_row(p), columns(j), p.cols, v[j]);
  }
}

TM_KERNEL(kThreads, 4) void rank_sum_rows(const TM_GRID_CONSTANT DeviceRankSum p) {
  let_next_start();
  wait_for_previous();
  const int c = blockIdx.y * kColsPerBlock + 4 * threadIdx.x;
  const auto columns = [c](int) { return c; };
  float4 x[1] = {}, v[1] = {};
  load_x(p, columns, x);
  meet_ranks(p.exchange);
  update_pieces(p, columns, x, v);
}

// With a norm of up to 4096 columns.
template <typename T>
TM_KERNEL(kThreads, 2)
void rank_sum_norm_rows(const TM_GRID_CONSTANT DeviceRankSum p) {
  let_next_start();
  const int c = 4 * threadIdx.x;
  const auto columns = [c](int j) { return c + j * kColsPerBlock; };
  float4 x[kHeld] = {}, v[kHeld] = {}, w[kHeld] = {};
  load_held_weights(p.norm, w);
  wait_for_previous();
  load_x(p, columns, x);
  meet_ranks(p.exchange);
  update_pieces(p, columns, x, v);
  norm_held<T>(p.norm, v, w);
}

// With a norm of any width: a thread holds kHeld pieces at a time, and the row lies in shared
// memory.
template <typename T>
TM_KERNEL(kThreads, 2)
void rank_sum_norm_wide_rows(const TM_GRID_CONSTANT DeviceRankSum p) {
  let_next_start();
  wait_for_previous();
  meet_ranks(p.exchange);
  float4* row = shared_row();
  float4 s = make_float4(0, 0, 0, 0);
  for (int c = 4 * threadIdx.x; c < p.cols; c += kHeld * kColsPerBlock) {
    const auto columns = [c](int j) { return c + j * kColsPerBlock; };
    float4 x[kHeld] = {}, v[kHeld] = {};
    load_x(p, columns, x);
    update_pieces(p, columns, x, v);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (columns(j) >= p.cols) break;
      row[columns(j) / 4] = v[j];  // read again by this thread alone
      s = add_squares(v[j], s);
    }
  }
  norm_shared<T>(p.norm, row, s);
}

// A block has some columns of one rank's part: gridDim.y = ranks * blocks of the widest part.
TM_KERNEL(kThreads, 4)
void rank_columns(const TM_GRID_CONSTANT DeviceRankColumns p) {
  let_next_start();
  wait_for_previous();
  meet_ranks(p.exchange);
  if (p.y == nullptr) return;
  const int blocks_per_part = gridDim.y / p.exchange.ranks;
  const int rank = blockIdx.y / blocks_per_part;
  const int cols = p.begin[rank + 1] - p.begin[rank];
  const int c = blockIdx.y % blocks_per_part * kColsPerBlock + 4 * threadIdx.x;
  if (c >= cols) return;
  const float4 v = load_four(p.parts[rank] + blockIdx.x * p.part_strides[rank], c, cols);
  store_four(p.y + blockIdx.x * p.y_stride + p.begin[rank], c, cols, v);
}

TM_KERNEL(kWarp, 1) void meet_only(const TM_GRID_CONSTANT DeviceExchange p) {
  let_next_start();
  wait_for_previous();
  meet_ranks(p);
}

void check(const char* op, const DeviceExchange& e) {
  if (e.ranks < 1 || e.ranks > kMostGpuRanks || e.own < 0 || e.own >= e.ranks)
    throw_error(ErrorCode::internal, op, ": got rank ", e.own, " of ", e.ranks,
                ", expected at most ", kMostGpuRanks);
  const bool counted = std::all_of(e.counters, e.counters + e.ranks, [](auto* c) { return c; });
  if (e.waits && (!counted || e.base == nullptr || e.stop == nullptr || e.missing == nullptr))
    throw_error(ErrorCode::internal, op, ": got no counters, expected those of all ranks");
}

// Waits in one block where the kernel that follows is too large to wait. It is also launched where
// nothing waits, so that it is loaded with the kernels of such a step.
void meet_before(StreamHandle stream, const DeviceExchange& e, dim3 grid) {
  if (e.most_waiting > 0 && int64_t{grid.x} * grid.y > e.most_waiting)
    launch<meet_only>(stream, dim3(1), kWarp, 0, e);
}

int blocks_of(int cols) {
  return (cols + kColsPerBlock - 1) / kColsPerBlock;
}

template <typename T>
void launch_normed(StreamHandle stream, const DeviceRankSum& s) {
  const dim3 grid(static_cast<unsigned>(s.rows));
  meet_before(stream, s.exchange, grid);
  if (s.cols <= kHeldCols)
    launch<rank_sum_norm_rows<T>>(stream, grid, kThreads, kNormSums, s);
  else
    launch<rank_sum_norm_wide_rows<T>>(stream, grid, kThreads, kNormSums + shared_row_bytes(s.cols),
                                       s);
}

void sum(StreamHandle stream, const DeviceRankSum& s) {
  check("rank_sum", s.exchange);
  const DeviceNorm& n = s.norm;
  if (s.rows < 1 || s.cols < 1 || s.part_stride < s.cols || s.x_stride < s.cols ||
      (n.y && (n.rows != s.rows || n.cols != s.cols || n.cols > kMaxNormCols || n.padded < n.cols ||
               n.y_stride < n.padded)))
    throw_error(ErrorCode::internal, "rank_sum: got [", s.rows, ", ", s.cols, "] with strides ",
                s.part_stride, " and ", s.x_stride, " and a norm of [", n.rows, ", ", n.cols,
                "] padded to ", n.padded, " with stride ", n.y_stride,
                ", expected equal shapes in rows that hold them, a norm of at most ", kMaxNormCols,
                " columns");
  if (!n.y) {
    const dim3 grid(static_cast<unsigned>(s.rows), static_cast<unsigned>(blocks_of(s.cols)));
    meet_before(stream, s.exchange, grid);
    return launch<rank_sum_rows>(stream, grid, kThreads, 0, s);
  }
  switch (n.y_dtype) {
    case DType::f32:
      return launch_normed<float>(stream, s);
    case DType::bf16:
      return launch_normed<Bf16>(stream, s);
    case DType::f16:
      return launch_normed<F16>(stream, s);
  }
}

void columns(StreamHandle stream, const DeviceRankColumns& c) {
  check("rank_columns", c.exchange);
  int widest = 1;
  for (int r = 0; r < c.exchange.ranks; ++r) {
    const int cols = c.begin[r + 1] - c.begin[r];
    if (cols < 0 || c.part_strides[r] < cols)
      throw_error(ErrorCode::internal, "rank_columns: rank ", r, " has ", cols,
                  " columns with stride ", c.part_strides[r], ", expected rows that hold them");
    widest = std::max(widest, cols);
  }
  if (c.rows < 1 || (c.y && c.y_stride < c.begin[c.exchange.ranks]))
    throw_error(ErrorCode::internal, "rank_columns: got ", c.rows, " rows with stride ", c.y_stride,
                ", expected at least 1 of ", c.begin[c.exchange.ranks], " columns");
  if (!c.y) return launch<meet_only>(stream, dim3(1), kWarp, 0, c.exchange);
  const int blocks = blocks_of(widest);
  const dim3 grid(static_cast<unsigned>(c.rows), static_cast<unsigned>(blocks * c.exchange.ranks));
  meet_before(stream, c.exchange, grid);
  launch<rank_columns>(stream, grid, kThreads, 0, c);
}

void meet(StreamHandle stream, const DeviceExchange& e) {
  check("rank_meet", e);
  launch<meet_only>(stream, dim3(1), kWarp, 0, e);
}

}  // namespace

extern const RankSumCuda kRankSumCuda;
const RankSumCuda kRankSumCuda{sum, columns, meet};

}  // namespace turbomind::TM_CUDA_NS
