// The loops around a register block, and the epilogue: shared by all dense kernels of one ISA.
#pragma once

#include "cpu/isa_build.h"
#include "cpu/vec.h"
#include "linear/linear_kernels.h"

namespace turbomind::TM_ISA_NS {

// Defined where the instruction set has them.
extern const LinearKernel bf16_dot_kernel, bf16_dot_eight_kernel, bf16_tile_kernel,
    bf16_tile_small_kernel;

constexpr int kPanelVecs = 16 / kLanes;
// Weights are prefetched this far ahead in each panel while they are used once (few rows).
constexpr int64_t kAheadBytes = 4096;

static inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// The lines that the register block prefetches while it computes, line for line in step with its
// own: `panels` panels from `base` on, and x of the `x_rows` rows after its own; and the sums that
// the next block starts from, null where it starts from zero.
struct Prefetch {
  const uint8_t* base;
  int panels;
  int x_rows;
  const float* sums;
};

// The cache line at `offset` of each panel, into the second-level cache.
static inline void fetch(const Prefetch& p, int64_t panel_bytes, int64_t offset) {
  for (int i = 0; i < p.panels; ++i) {
    __builtin_prefetch(p.base + i * panel_bytes + offset, 0, 2);
  }
}

// Adds bias and addend of packed columns [col, col + count) to acc; count <= kLanes.
static inline VecF with_bias(const LinearJob& job, int64_t row, int64_t col, int count, VecF acc) {
  if (job.bias != nullptr) acc = acc + load_n(job.bias + col, count);
  if (job.addend != nullptr) {
    acc = acc + load_n(job.addend + row * job.addend_stride + col, count);
  }
  return acc;
}

static inline void store_y(const LinearJob& job, int64_t row, int64_t col, int count, VecF v) {
  const int64_t at = row * job.y_stride + col;
  if (job.y_bf16) {
    store_bf16_n(static_cast<uint16_t*>(job.y) + at, v, count);
  } else {
    float* y = static_cast<float*>(job.y) + at;
    if (job.epilogue == Epilogue::add) v = load_n(y, count) + v;
    store_n(y, v, count);
  }
}

static inline int lanes_left(int64_t end, int64_t col) {
  const int64_t left = end - col;
  return left <= 0 ? 0 : left < kLanes ? static_cast<int>(left) : kLanes;
}

static void zero_padding(const LinearJob& job, int64_t row) {
  for (int64_t c = job.y_cols; c < job.y_zero_end; ++c) {
    const int64_t at = row * job.y_stride + c;
    if (job.y_bf16)
      static_cast<uint16_t*>(job.y)[at] = 0;
    else
      static_cast<float*>(job.y)[at] = 0;
  }
}

// The order of the arguments of min and max lets a NaN pass.
static inline VecF clamped_swiglu(VecF gate, VecF up) {
  const VecF limit = broadcast(kSwigluLimit), one = broadcast(1.0f);
  const VecF g = min(limit, gate), u = max(zero() - limit, min(limit, up));
  return g / (one + exp(g * broadcast(-kSwigluAlpha))) * (u + one);
}

static inline VecF gated(Epilogue epilogue, VecF gate, VecF up) {
  if (epilogue == Epilogue::swiglu_mul) return clamped_swiglu(gate, up);
  return (epilogue == Epilogue::gelu_mul ? gelu_tanh(gate) : silu(gate)) * up;
}

// acc holds one row of `panels` panels from `panel` on.
[[maybe_unused]] static void finish_row(const LinearJob& job, int64_t row, int64_t panel,
                                        int panels, const float* acc) {
  const int64_t col0 = panel * 16;
  if (is_gated(job.epilogue)) {
    for (int v = 0; v < panels / 2 * kPanelVecs; ++v) {
      const int at = v / kPanelVecs * 32 + v % kPanelVecs * kLanes;
      const VecF gate = with_bias(job, row, col0 + at, kLanes, load(acc + at));
      const VecF up = with_bias(job, row, col0 + at + 16, kLanes, load(acc + at + 16));
      const int64_t col = panel * 8 + v * kLanes;
      store_y(job, row, col, lanes_left(job.y_cols, col), gated(job.epilogue, gate, up));
    }
  } else {
    for (int v = 0; v < panels * kPanelVecs; ++v) {
      const int64_t col = col0 + v * kLanes;
      const int count = lanes_left(job.n, col);
      store_y(job, row, col, count, with_bias(job, row, col, count, load(acc + v * kLanes)));
    }
  }
  if ((panel + panels) * 16 >= job.n) zero_padding(job, row);
}

// One row of full panels whose epilogue needs no mask; the bits are those of finish_row.
template <Epilogue kEpilogue, bool kBias, bool kBf16>
static void finish_full_row(const LinearJob& job, int64_t row, int64_t panel, int panels,
                            const float* acc) {
  const auto sum = [&](int at) {
    const VecF v = load(acc + at);
    return kBias ? v + load(job.bias + panel * 16 + at) : v;
  };
  constexpr bool kGated = is_gated(kEpilogue);
  const int64_t to = row * job.y_stride + panel * (kGated ? 8 : 16);
  const int vectors = (kGated ? panels / 2 : panels) * kPanelVecs;
  for (int v = 0; v < vectors; ++v) {
    VecF out;
    if constexpr (kGated) {
      const int at = v / kPanelVecs * 32 + v % kPanelVecs * kLanes;
      out = gated(kEpilogue, sum(at), sum(at + 16));
    } else {
      out = sum(v * kLanes);
    }
    if constexpr (kBf16) {
      store_bf16(static_cast<uint16_t*>(job.y) + to + v * kLanes, out);
    } else {
      float* y = static_cast<float*>(job.y) + to + v * kLanes;
      if constexpr (kEpilogue == Epilogue::add) out = load(y) + out;
      store(y, out);
    }
  }
}

using FinishRow = void (*)(const LinearJob&, int64_t, int64_t, int, const float*);

template <bool kBias>
static FinishRow full_row_function(const LinearJob& job) {
  if (job.epilogue == Epilogue::add) {
    return job.y_bf16 ? nullptr : finish_full_row<Epilogue::add, kBias, false>;
  }
  if (job.epilogue == Epilogue::silu_mul) {
    return job.y_bf16 ? finish_full_row<Epilogue::silu_mul, kBias, true>
                      : finish_full_row<Epilogue::silu_mul, kBias, false>;
  }
  if (job.epilogue == Epilogue::gelu_mul) {
    return job.y_bf16 ? finish_full_row<Epilogue::gelu_mul, kBias, true>
                      : finish_full_row<Epilogue::gelu_mul, kBias, false>;
  }
  if (job.epilogue == Epilogue::swiglu_mul) {
    return job.y_bf16 ? finish_full_row<Epilogue::swiglu_mul, kBias, true>
                      : finish_full_row<Epilogue::swiglu_mul, kBias, false>;
  }
  return job.y_bf16 ? finish_full_row<Epilogue::store, kBias, true>
                    : finish_full_row<Epilogue::store, kBias, false>;
}

// Rows of a block whose sums are complete and that the epilogue has not written yet. The tile
// kernel writes them beside the products of the next block: its multiplier and the vector units
// work at the same time.
class Unfinished {
 public:
  explicit Unfinished(const LinearJob& job) : job_(job) {
    if (job.addend != nullptr) return;
    full_row_ = job.bias != nullptr ? full_row_function<true>(job) : full_row_function<false>(job);
  }
  // Takes the next block; the rows of the last one are all finished.
  void take(int64_t row, int rows, int64_t panel, int panels, const float* acc,
            int64_t acc_stride) {
    row_ = row;
    end_ = row + rows;
    panel_ = panel;
    panels_ = panels;
    acc_ = acc;
    acc_stride_ = acc_stride;
    const bool last = (panel + panels) * 16 >= job_.n;  // padding follows
    const int64_t out = is_gated(job_.epilogue) ? 8 : 16;
    const bool full = (panel + panels) * 16 <= job_.n && (panel + panels) * out <= job_.y_cols;
    finish_ = full && full_row_ != nullptr && !last ? full_row_ : finish_row;
  }
  int64_t left() const { return end_ - row_; }
  void finish(int64_t rows) {
    for (int64_t end = smaller(end_, row_ + rows); row_ < end; ++row_, acc_ += acc_stride_) {
      finish_(job_, row_, panel_, panels_, acc_);
    }
  }

 private:
  const LinearJob& job_;
  FinishRow full_row_ = nullptr, finish_ = nullptr;
  int64_t row_ = 0, end_ = 0, panel_ = 0, acc_stride_ = 0;
  int panels_ = 0;
  const float* acc_ = nullptr;
};

// One block of rows and one group of panels, for the K blocks [k_begin, k_end) of a chunk.
struct Visit {
  int64_t group, block, chunk, row, panel, k_begin, k_end;
  int rows, panels;
};

// The order in which a piece is computed. A visit can be as short as 2 microseconds (6 rows, four
// panels, a K of 512), and its end waits for the stores of its results: what runs once per visit
// stores and divides as little as possible.
template <class Kernel>
struct Visits {
  const LinearJob& job;
  const LinearPiece& p;
  int64_t groups, chunks, blocks, block_rows, per_chunk, ahead;
  // Weights are used once: two chunks, whose border is where prefetching turns to the next panels.
  bool once;
  bool rows_stay;

  Visits(const LinearJob& j, const LinearPiece& piece) : job(j), p(piece) {
    const int64_t rows = p.row_end - p.row_begin, k_blocks = job.k_blocks;
    groups = (p.panel_end - p.panel_begin + Kernel::kPanels - 1) / Kernel::kPanels;
    blocks = (rows + Kernel::kRows - 1) / Kernel::kRows;
    const int64_t even = (rows + blocks - 1) / blocks;  // 8 rows: 4 + 4 rather than 6 + 2
    block_rows = (even + Kernel::kRowAlign - 1) / Kernel::kRowAlign * Kernel::kRowAlign;
    blocks = (rows + block_rows - 1) / block_rows;
    once = blocks == 1;
    rows_stay = Kernel::kPipelined && !once && job.order.stays == TileOrder::Stays::rows;
    const int64_t chunk = job.order.chunk_k_blocks;
    chunks = once ? 2 : (k_blocks + chunk - 1) / chunk;
    per_chunk = (k_blocks + chunks - 1) / chunks;
    ahead = smaller((kAheadBytes + job.k_block_bytes - 1) / job.k_block_bytes, k_blocks);
  }
  Visit at(int64_t group, int64_t block, int64_t chunk) const {
    Visit t;
    t.group = group;
    t.block = block;
    t.chunk = chunk;
    t.row = p.row_begin + block * block_rows;
    t.rows = static_cast<int>(smaller(block_rows, p.row_end - t.row));
    t.panel = p.panel_begin + group * Kernel::kPanels;
    t.panels = static_cast<int>(smaller(Kernel::kPanels, p.panel_end - t.panel));
    t.k_begin = once ? chunk * (job.k_blocks - ahead) : chunk * per_chunk;
    const int64_t length = !once ? per_chunk : chunk == 0 ? job.k_blocks - ahead : ahead;
    t.k_end = smaller(t.k_begin + length, job.k_blocks);
    return t;
  }
  // Used once: panel after panel, as they lie in memory. Else chunk after chunk, so that the chunk
  // of x, or of the weights, stays in the second-level cache for the whole piece. After the last
  // visit: one whose group or chunk does not exist.
  void advance(Visit& t) const {
    if (once) {
      t = t.chunk + 1 < chunks ? at(t.group, 0, t.chunk + 1) : at(t.group + 1, 0, 0);
    } else if (rows_stay) {
      t = t.group + 1 < groups   ? at(t.group + 1, t.block, t.chunk)
          : t.block + 1 < blocks ? at(0, t.block + 1, t.chunk)
                                 : at(0, 0, t.chunk + 1);
    } else if (t.block + 1 == blocks) {
      t = next_weights(t);
    } else {
      ++t.block;
      t.row += block_rows;
      t.rows = static_cast<int>(smaller(block_rows, p.row_end - t.row));
    }
  }
  bool exists(const Visit& t) const { return t.group < groups && t.chunk < chunks; }
  const uint8_t* weights(const Visit& t) const {
    return job.w + t.panel * job.panel_bytes + t.k_begin * job.k_block_bytes;
  }
  // The visit whose weights are prefetched during visits of t's group, block and chunk; while the
  // weights stay it is the same for all blocks.
  Visit fetched(const Visit& t) const {
    if (once) return t.chunk == 0 ? t : at(t.group + 1, 0, 0);
    if (!rows_stay) return next_weights(t);
    if (t.block == blocks - 1) return at(t.group, 0, t.chunk + 1);
    return t.block == 0 ? at(t.group + 1, 0, t.chunk) : at(groups, 0, t.chunk);
  }
  // The panels that visit t prefetches: while weights stay, each block of rows takes its share of
  // the next group; while rows stay, the first takes it whole, and the last the next chunk's.
  Prefetch prefetch(const Visit& t, const Visit& fetched) const {
    if (once) return prefetch_once(t, fetched);
    Prefetch none = {nullptr, 0, 0, nullptr};
    // The first group of a chunk brings its part of x near for all the others.
    if (t.group == 0) {
      none.x_rows = static_cast<int>(smaller(block_rows, p.row_end - t.row - t.rows));
    }
    if (!exists(fetched)) return none;
    const uint32_t parts = static_cast<uint32_t>(rows_stay ? 1 : blocks);
    const uint32_t part = static_cast<uint32_t>(rows_stay ? 0 : t.block);
    const uint32_t panels = static_cast<uint32_t>(fetched.panels);
    const uint32_t first = (part * panels + parts - 1) / parts;
    const uint32_t end = ((part + 1) * panels + parts - 1) / parts;
    none.base = weights(fetched) + first * job.panel_bytes;
    none.panels = static_cast<int>(end - first);
    return none;
  }

 private:
  Visit next_weights(const Visit& t) const {
    return t.group + 1 < groups ? at(t.group + 1, 0, t.chunk) : at(0, 0, t.chunk + 1);
  }
  Prefetch prefetch_once(const Visit& t, const Visit& fetched) const {
    if (fetched.group < groups) {
      const int64_t skip = t.chunk == 0 ? ahead * job.k_block_bytes : 0;
      return {weights(fetched) + skip, fetched.panels, 0, nullptr};
    }
    if (p.next_panel < 0) return {nullptr, 0, 0, nullptr};
    const int panels = static_cast<int>(smaller(Kernel::kPanels, p.panel_end - p.panel_begin));
    return {job.w + p.next_panel * job.panel_bytes, panels, 0, nullptr};
  }
};

// Kernel: static members kRows, kRowAlign (of a block's rows), kPanels, kPipelined (finishes rows
// of `unfinished` while it computes), kUnpacks, begin(piece) and block(job, visit, w, acc,
// acc_stride, prefetch, unfinished), which adds the visit's K blocks to acc (from zero when k_begin
// is 0). With kUnpacks also unpack(job, visit, w, out): where several blocks of rows share the
// weights of a visit, it writes them to `out`, and block takes `out` after w; null: it takes them
// as they lie. For one row the additions run over k ascending whatever the piece, block and chunk
// are.
template <class Kernel>
static void run_piece(const LinearJob& job, const LinearPiece& p, float* scratch) {
  Kernel::begin(p);
  const Visits<Kernel> visits(job, p);
  constexpr int64_t kStride = Kernel::kPanels * 16, kSums = Kernel::kRows * kStride;
  // Partial sums stay in scratch. Sums that are complete after one visit need two places: one is
  // finished while the other is computed.
  const bool keep = !visits.once && visits.chunks > 1;
  const auto sums = [&](int64_t v, const Visit& t) {
    const int64_t place = keep                  ? t.group * visits.blocks + t.block
                          : !Kernel::kPipelined ? 0
                          : visits.once         ? t.group % 2
                                                : v % 2;
    return scratch + place * kSums;
  };
  uint8_t* unpacked = nullptr;
  if (Kernel::kUnpacks && !visits.once) {
    unpacked =
        reinterpret_cast<uint8_t*>(scratch + linear_sum_floats(Kernel::kRows, Kernel::kPanels, p));
  }
  Unfinished unfinished(job);
  Visit visit = visits.at(0, 0, 0), fetched = visit;
  for (int64_t v = 0; visits.exists(visit); ++v, visits.advance(visit)) {
    float* acc = sums(v, visit);
    if (visit.block == 0 || visits.rows_stay) fetched = visits.fetched(visit);
    Prefetch prefetch = visits.prefetch(visit, fetched);
    if (Kernel::kPipelined && keep) {
      Visit next = visit;
      visits.advance(next);
      if (next.k_begin > 0 && visits.exists(next)) prefetch.sums = sums(v + 1, next);
    }
    const uint8_t* w = visits.weights(visit);
    if constexpr (Kernel::kUnpacks) {
      if (unpacked != nullptr && visit.block == 0) Kernel::unpack(job, visit, w, unpacked);
      Kernel::block(job, visit, w, unpacked, acc, kStride, prefetch, unfinished);
    } else {
      Kernel::block(job, visit, w, acc, kStride, prefetch, unfinished);
    }
    if (visit.k_end < job.k_blocks) continue;
    unfinished.finish(unfinished.left());
    unfinished.take(visit.row, visit.rows, visit.panel, visit.panels, acc, kStride);
    if (!Kernel::kPipelined) unfinished.finish(unfinished.left());
  }
  unfinished.finish(unfinished.left());
}

}  // namespace turbomind::TM_ISA_NS
