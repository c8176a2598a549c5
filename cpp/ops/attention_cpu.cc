// One block of query rows over the pages of its sequence, with an online softmax in base 2.
#include "ops/attention_kernels.h"

#include "ops/attention_gemm.h"

namespace turbomind::TM_ISA_NS {

constexpr int kPage = 64;     // keys per page
constexpr int kKeyStep = 32;  // keys are taken in pieces of this many (the k of one bf16 tile)
#if TM_HAS_TILES
constexpr int kBlockRows = 32;
constexpr int kSpareRows = 16;  // tiles are read and written whole
#else
constexpr int kBlockRows = 48;
constexpr int kSpareRows = 16;  // vectors over rows are read and written whole
#endif
constexpr int kAllRows = kBlockRows + kSpareRows;
constexpr float kLog2E = 1.44269504f;
// The first value of a running maximum: below any score, and finite so that differences are.
constexpr float kLowest = -1e30f;

struct Work {
  void* q;       // [rows][k_width], the compute type
  float* score;  // [rows][kPage]
  void* weight;  // [rows][kPage], the compute type
  float* out;    // [rows][v_width], not yet divided
  float* fresh;  // [rows][v_width], one page's product (tiles only)
  float* sum;    // [rows][kLanes], partial sums of the weights
  float* top;    // [rows], running maximum
  float* decay;  // [rows], what this page's maximum makes of earlier sums
};

static size_t scratch_floats(int k_width, int v_width) {
  const size_t per_row = k_width + 2 * kPage + 2 * v_width + kLanes + 2;
  return kAllRows * per_row + 16;
}

static Work carve(float* p, int k_width, int v_width) {
  p = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) & ~uintptr_t{63});
  Work w;
  w.q = p, p += kAllRows * k_width;
  w.score = p, p += kAllRows * kPage;
  w.weight = p, p += kAllRows * kPage;
  w.out = p, p += kAllRows * v_width;
  w.fresh = p, p += kAllRows * v_width;
  w.sum = p, p += kAllRows * kLanes;
  w.top = p, p += kAllRows;
  w.decay = p;
  return w;
}

template <class A>
static void begin(const AttentionBlock& b, const Work& w) {
  A* q = static_cast<A*>(w.q);
  for (int r = 0; r < b.m_count; ++r) {
    const int64_t i = (b.m_begin + r) / b.group, g = (b.m_begin + r) % b.group;
    std::memcpy(q + r * b.k_width, static_cast<const A*>(b.q) + i * b.q_stride + g * b.k_width,
                sizeof(A) * b.k_width);
    std::memset(w.out + r * b.v_width, 0, sizeof(float) * b.v_width);
    std::memset(w.sum + r * kLanes, 0, sizeof(float) * kLanes);
    w.top[r] = kLowest;
    if (b.sinks) {  // a sink is a key with this score and no value
      const float s = b.sinks[g] * kLog2E;
      w.top[r] = s > kLowest ? s : kLowest;
      w.sum[r * kLanes] = 1;
    }
  }
}

// The rows of a block that see any key of a page, and how many of its keys they see at most.
struct Reach {
  int begin, end, keys;
};

static Reach reach(const AttentionBlock& b, int64_t first_key) {
  Reach r;
  const int64_t before = (first_key - b.kv_begin) * b.group - b.m_begin;
  r.begin = before > 0 ? static_cast<int>(before) : 0;
  r.end = b.m_count;
  if (b.window) {
    const int64_t after = (first_key + kPage + b.window - 1 - b.kv_begin) * b.group - b.m_begin;
    if (after < r.end) r.end = static_cast<int>(after);
  }
  const int64_t last_query = b.kv_begin + (b.m_begin + r.end - 1) / b.group;
  r.keys =
      last_query + 1 - first_key < kPage ? static_cast<int>(last_query + 1 - first_key) : kPage;
  return r;
}

// Removes the keys that a row does not see. Most pages are seen whole by every row.
static void mask_scores(const AttentionBlock& b, const Work& w, const Reach& rows, int keys,
                        int64_t first_key) {
  const int64_t shift = b.kv_begin - first_key;
  const int64_t first =
      shift + (b.m_begin + rows.begin) / b.group;  // queries, from the page's begin
  const int64_t last = shift + (b.m_begin + rows.end - 1) / b.group;
  if (first >= keys - 1 && (!b.window || last < b.window)) return;
  for (int r = rows.begin; r < rows.end; ++r) {
    float* s = w.score + r * kPage;
    const int64_t query = shift + (b.m_begin + r) / b.group;
    const int64_t low = b.window ? query - b.window + 1 : 0;
    for (int j = 0; j < low && j < keys; ++j) s[j] = -__builtin_inff();
    for (int64_t j = query + 1; j < keys; ++j) s[j] = -__builtin_inff();
  }
}

// Soft cap in place; returns the factor that takes the scores to base 2.
static float cap_scores(const AttentionBlock& b, const Work& w, const Reach& rows, int keys) {
  if (!(b.softcap > 0)) return b.scale * kLog2E;
  const VecF in = broadcast(b.scale / b.softcap), out = broadcast(b.softcap);
  for (int r = rows.begin; r < rows.end; ++r) {
    float* s = w.score + r * kPage;
    for (int j = 0; j < keys; j += kLanes) store(s + j, tanh(load(s + j) * in) * out);
  }
  return kLog2E;
}

static void update_top(const Work& w, const Reach& rows, int keys, float factor) {
  for (int r = rows.begin; r < rows.end; ++r) {
    const float* s = w.score + r * kPage;
    VecF top = load(s);
    for (int j = kLanes; j < keys; j += kLanes) top = max(top, load(s + j));
    const float t = reduce_max(top) * factor;
    w.decay[r] = w.top[r];
    w.top[r] = t > w.top[r] ? t : w.top[r];
  }
  for (int r = rows.begin; r < rows.end; r += kLanes) {
    store(w.decay + r, exp2_nonpositive(load(w.decay + r) - load(w.top + r)));
  }
}

// 2^x, stored as a softmax weight.
static TM_INLINE VecF make_weight(float* p, VecF x) {
  const VecF e = exp2_nonpositive(x);
  store(p, e);
  return e;
}
#if TM_HAS_BF16_DOT
static TM_INLINE VecF make_weight(uint16_t* p, VecF x) {
  const VecF e = exp2_coarse(x);
  store_bf16(p, e);
  return e;
}
#endif

template <class A>
static void weigh(const Work& w, const Reach& rows, int keys, float factor) {
  const VecF f = broadcast(factor);
  for (int r = rows.begin; r < rows.end; ++r) {
    const float* s = w.score + r * kPage;
    A* p = static_cast<A*>(w.weight) + r * kPage;
    const VecF down = broadcast(-w.top[r]);
    VecF sum = zero();
    for (int j = 0; j < keys; j += kLanes) {
      sum = sum + make_weight(p + j, fma(load(s + j), f, down));
    }
    float* total = w.sum + r * kLanes;
    store(total, fma(load(total), broadcast(w.decay[r]), sum));
  }
}

template <class Kind>
static void multiply_scores(const AttentionBlock& b, const Work& w, const Reach& rows, int keys,
                            const uint8_t* k_block, int64_t ahead) {
  Product<Kind> g;
  g.lda = b.k_width;
  g.a = static_cast<const typename Kind::A*>(w.q) + rows.begin * g.lda;
  g.b = reinterpret_cast<const typename Kind::B*>(k_block);
  g.panel_stride = int64_t{b.k_width} * kPanel;
  g.steps = b.k_width / Kind::kPair;
  g.ldc = kPage;
  g.c = w.score + rows.begin * g.ldc;
  g.decay = nullptr;
  g.ahead = ahead;
#if TM_HAS_TILES
  if constexpr (Kind::kPair == 2) return tile_product(g, rows.end - rows.begin, keys / kPanel);
#endif
  product<Kind>(g, rows.end - rows.begin, keys / kPanel);
}

template <class Kind>
static void multiply_values(const AttentionBlock& b, const Work& w, const Reach& rows, int keys,
                            const uint8_t* v_block, int64_t ahead) {
  Product<Kind> g;
  g.lda = kPage;
  g.a = static_cast<const typename Kind::A*>(w.weight) + rows.begin * g.lda;
  g.b = reinterpret_cast<const typename Kind::B*>(v_block);
  g.panel_stride = int64_t{kPage} * kPanel;
  g.steps = keys / Kind::kPair;
  g.ldc = b.v_width;
  g.c = w.out + rows.begin * g.ldc;
  g.decay = w.decay + rows.begin;
  g.ahead = ahead;
#if TM_HAS_TILES
  if constexpr (Kind::kPair == 2) {
    g.c = w.fresh + rows.begin * g.ldc;
    tile_product(g, rows.end - rows.begin, b.v_width / kPanel);
    for (int r = rows.begin; r < rows.end; ++r) {
      const VecF decay = broadcast(w.decay[r]);
      float* out = w.out + r * b.v_width;
      const float* fresh = w.fresh + r * b.v_width;
      for (int c = 0; c < b.v_width; c += kLanes) {
        store(out + c, fma(load(out + c), decay, load(fresh + c)));
      }
    }
    return;
  }
#endif
  product<Kind>(g, rows.end - rows.begin, b.v_width / kPanel);
}

static void finish(const AttentionBlock& b, const Work& w) {
  for (int r = 0; r < b.m_count; ++r) {
    const int64_t i = (b.m_begin + r) / b.group, g = (b.m_begin + r) % b.group;
    const int64_t at = i * b.out_stride + g * b.v_dim;
    const VecF sum = broadcast(reduce_add(load(w.sum + r * kLanes)));
    for (int c = 0; c < b.v_dim; c += kLanes) {
      const int n = b.v_dim - c < kLanes ? b.v_dim - c : kLanes;
      const VecF v = load(w.out + r * b.v_width + c) / sum;
      if (b.bf16_out) {
        store_bf16_n(static_cast<uint16_t*>(b.out) + at + c, v, n);
      } else {
        store_n(static_cast<float*>(b.out) + at + c, v, n);
      }
    }
  }
}

template <class Kind>
static void attend_as(const AttentionBlock& b, float* scratch) {
  const Work w = carve(scratch, b.k_width, b.v_width);
  begin<typename Kind::A>(b, w);
#if TM_HAS_TILES
  tile_configure(b.m_count < kTileRows ? b.m_count : kTileRows);
#endif
  const int64_t first_query = b.kv_begin + b.m_begin / b.group;
  const int64_t last_query = b.kv_begin + (b.m_begin + b.m_count - 1) / b.group;
  const int64_t lowest = b.window ? first_query - b.window + 1 : 0;
  const int64_t last_page = last_query / kPage;
  for (int64_t page = (lowest > 0 ? lowest : 0) / kPage; page <= last_page; ++page) {
    const int64_t first_key = page * kPage;
    const uint8_t* data = b.base + static_cast<size_t>(b.pages[page]) * b.page_bytes;
    const int64_t hop = page < last_page ? b.pages[page + 1] - int64_t{b.pages[page]} : 0;
    const int64_t ahead = hop * static_cast<int64_t>(b.page_bytes);
    const Reach rows = reach(b, first_key);
    const int keys = (rows.keys + kKeyStep - 1) / kKeyStep * kKeyStep;
    multiply_scores<Kind>(b, w, rows, keys, data + b.k_offset, ahead);
    const float factor = cap_scores(b, w, rows, keys);
    mask_scores(b, w, rows, keys, first_key);
    update_top(w, rows, keys, factor);
    weigh<typename Kind::A>(w, rows, keys, factor);
    multiply_values<Kind>(b, w, rows, keys, data + b.v_offset, ahead);
  }
  finish(b, w);
}

static void attend(const AttentionBlock& b, float* scratch) {
  if (b.kv == DType::f32) return attend_as<FmaF32>(b, scratch);
#if TM_HAS_BF16_DOT
  attend_as<DotBf16>(b, scratch);
#else
  attend_as<FmaBf16>(b, scratch);
#endif
}

const AttentionKernels& attention_kernels() {
  static constexpr AttentionKernels table{kBlockRows, scratch_floats, attend};
  return table;
}

}  // namespace turbomind::TM_ISA_NS
