// Blocks of query rows over the pages of their sequence, with an online softmax in base 2 over the
// pages of a split. The page is the outer loop: its K and V come from memory once and serve all
// rows of the block, which are taken in steps of kStepRows.
#include <type_traits>

#include "ops/attention_gemm.h"
#include "ops/attention_kernels.h"
#include "ops/attention_rows.h"

namespace turbomind::TM_ISA_NS {

constexpr int kPage = 64;       // keys per page
constexpr int kKeyStep = 32;    // keys are taken in pieces of this many (the k of one bf16 tile)
constexpr int kSpareRows = 16;  // tiles, and vectors over rows, are read and written whole
#if TM_HAS_TILES
constexpr int kStepRows = 32;
constexpr int kMostRows = 256;  // their queries and outputs stay in the second cache
#else
constexpr int kStepRows = 48;
constexpr int kMostRows = 48;
#endif
constexpr int kAllRows = kMostRows + kSpareRows;
constexpr int kPageRows = kStepRows + kSpareRows;

// The scores of a step's rows with a page, and what becomes of them.
struct PageWork {
  float* score;  // [rows][kPage]
  void* weight;  // [rows][kPage], the compute type
  float* decay;  // [rows], what this page's maximum makes of earlier sums
};

struct Work {
  void* q;  // [rows][k_width], the compute type
  RowParts split, span, total;
  float* lanes;      // [rows][kLanes], partial sums of the split's weights
  float* saved;      // [kSpareRows][v_width]
  PageWork page[2];  // the second for tiles only
};

static size_t scratch_floats(int k_width, int v_width) {
  const size_t per_row = k_width + 3 * (v_width + 2) + kLanes;
  return kAllRows * per_row + kSpareRows * v_width + 2 * kPageRows * (2 * kPage + 1) + 16;
}

static float* take(float*& p, int floats) {
  float* taken = p;
  p += floats;
  return taken;
}

static Work carve(float* p, int k_width, int v_width) {
  p = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(p) + 63) & ~uintptr_t{63});
  Work w;
  w.q = take(p, kAllRows * k_width);
  RowParts* const parts[] = {&w.split, &w.span, &w.total};
  for (RowParts* part : parts) {
    part->out = take(p, kAllRows * v_width);
    part->top = take(p, kAllRows);
    part->sum = take(p, kAllRows);
  }
  w.lanes = take(p, kAllRows * kLanes);
  w.saved = take(p, kSpareRows * v_width);
  for (PageWork& page : w.page) {
    page.score = take(p, kPageRows * kPage);
    page.weight = take(p, kPageRows * kPage);
    page.decay = take(p, kPageRows);
  }
  return w;
}

template <class A>
static void copy_queries(const AttentionBlock& b, const Work& w) {
  A* q = static_cast<A*>(w.q);
  for (int r = 0; r < b.m_count; ++r) {
    const int64_t i = (b.m_begin + r) / b.group, g = (b.m_begin + r) % b.group;
    std::memcpy(q + r * b.k_width, static_cast<const A*>(b.q) + i * b.q_stride + g * b.k_width,
                sizeof(A) * b.k_width);
  }
}

// A page and a step of the block's rows. `rows` see any of its keys; they see at most `keys` of
// them, a multiple of kKeyStep.
struct Item {
  int first_row;  // of the step; the work of the page begins with it
  RowRange rows;
  int keys;
  int64_t first_key;
  const uint8_t* page;
  int64_t ahead;  // see Product
};

// Items of a split in the order in which they are taken. The split after it, up to page `end_page`
// of the task, comes next: its first page is fetched ahead too.
struct Items {
  const AttentionBlock& b;
  int64_t page, last_page, end_page;
  int row = 0;

  bool next(Item& item) {
    for (; page <= last_page; ++page, row = 0) {
      for (; row < b.m_count; row += kStepRows) {
        const int end = row + kStepRows < b.m_count ? row + kStepRows : b.m_count;
        const int64_t first_key = page * kPage;
        const RowRange rows = rows_of(b, row, end, first_key, kPage);
        if (rows.begin >= rows.end) continue;
        const int64_t seen = query_of(b, rows.end - 1) + 1 - first_key;
        const int keys = seen < kPage ? static_cast<int>(seen) : kPage;
        const int64_t hop = page < end_page ? b.pages[page + 1] - int64_t{b.pages[page]} : 0;
        item = {row,
                rows,
                (keys + kKeyStep - 1) / kKeyStep * kKeyStep,
                first_key,
                b.base + static_cast<size_t>(b.pages[page]) * b.page_bytes,
                row == 0 ? hop * static_cast<int64_t>(b.page_bytes) : 0};
        row += kStepRows;
        return true;
      }
    }
    return false;
  }
};

// Removes the keys that a row does not see. Most pages are seen whole by every row.
static void mask_scores(const AttentionBlock& b, const Item& item, const PageWork& page) {
  const int64_t first = query_of(b, item.rows.begin) - item.first_key;  // from the page's begin
  const int64_t last = query_of(b, item.rows.end - 1) - item.first_key;
  const int keys = item.keys;
  if (first >= keys - 1 && (!b.window || last < b.window)) return;
  for (int r = item.rows.begin; r < item.rows.end; ++r) {
    float* s = page.score + (r - item.first_row) * kPage;
    const int64_t query = query_of(b, r) - item.first_key;
    const int64_t low = b.window ? query - b.window + 1 : 0;
    for (int j = 0; j < low && j < keys; ++j) s[j] = -__builtin_inff();
    for (int64_t j = query + 1; j < keys; ++j) s[j] = -__builtin_inff();
  }
}

// Soft cap in place; returns the factor that takes the scores to base 2.
static float cap_scores(const AttentionBlock& b, const Item& item, const PageWork& page) {
  if (!(b.softcap > 0)) return b.scale * kLog2E;
  const VecF in = broadcast(b.scale / b.softcap), out = broadcast(b.softcap);
  for (int r = item.rows.begin; r < item.rows.end; ++r) {
    float* s = page.score + (r - item.first_row) * kPage;
    for (int j = 0; j < item.keys; j += kLanes) store(s + j, tanh(load(s + j) * in) * out);
  }
  return kLog2E;
}

// Raises the maxima of rows [begin, end).
static void update_top(const Work& w, const Item& item, const PageWork& page, float factor,
                       int begin, int end) {
  float *top = w.split.top, *decay = page.decay - item.first_row;
  for (int r = begin; r < end; ++r) {
    const float* s = page.score + (r - item.first_row) * kPage;
    VecF most = load(s);
    for (int j = kLanes; j < item.keys; j += kLanes) most = max(most, load(s + j));
    const float t = reduce_max(most) * factor;
    decay[r] = top[r];
    top[r] = t > top[r] ? t : top[r];
  }
  for (int r = begin; r < end; r += kLanes) {
    store(decay + r, exp2_nonpositive(load(decay + r) - load(top + r)));
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
static void weigh(const Work& w, const Item& item, const PageWork& page, float factor, int begin,
                  int end) {
  const VecF f = broadcast(factor);
  for (int r = begin; r < end; ++r) {
    const float* s = page.score + (r - item.first_row) * kPage;
    A* p = static_cast<A*>(page.weight) + (r - item.first_row) * kPage;
    const VecF down = broadcast(-w.split.top[r]);
    VecF sum = zero();
    for (int j = 0; j < item.keys; j += kLanes) {
      sum = sum + make_weight(p + j, fma(load(s + j), f, down));
    }
    float* total = w.lanes + r * kLanes;
    store(total, fma(load(total), broadcast(page.decay[r - item.first_row]), sum));
  }
}

template <class Kind>
static Product<Kind> score_product(const AttentionBlock& b, const Work& w, const Item& item,
                                   const PageWork& page) {
  Product<Kind> g;
  g.lda = b.k_width;
  g.a = static_cast<const typename Kind::A*>(w.q) + item.rows.begin * g.lda;
  g.b = reinterpret_cast<const typename Kind::B*>(item.page + b.k_offset);
  g.panel_stride = int64_t{b.k_width} * kPanel;
  g.steps = b.k_width / Kind::kPair;
  g.ldc = kPage;
  g.c = page.score + (item.rows.begin - item.first_row) * g.ldc;
  g.decay = nullptr;
  g.add = false;
  g.ahead = item.ahead;
  return g;
}

template <class Kind>
static Product<Kind> value_product(const AttentionBlock& b, const Work& w, const Item& item,
                                   const PageWork& page) {
  Product<Kind> g;
  g.lda = kPage;
  g.a = static_cast<const typename Kind::A*>(page.weight) +
        (item.rows.begin - item.first_row) * g.lda;
  g.b = reinterpret_cast<const typename Kind::B*>(item.page + b.v_offset);
  g.panel_stride = int64_t{kPage} * kPanel;
  g.steps = item.keys / Kind::kPair;
  g.ldc = b.v_width;
  g.c = w.split.out + item.rows.begin * g.ldc;
  g.decay = page.decay + (item.rows.begin - item.first_row);
  g.add = true;
  g.ahead = item.ahead;
  return g;
}

template <class Kind>
static void take_items(const AttentionBlock& b, const Work& w, Items items) {
  const PageWork& page = w.page[0];
  for (Item item; items.next(item);) {
    const RowRange rows = item.rows;
    product<Kind>(score_product<Kind>(b, w, item, page), rows.end - rows.begin, item.keys / kPanel);
    const float factor = cap_scores(b, item, page);
    mask_scores(b, item, page);
    update_top(w, item, page, factor, rows.begin, rows.end);
    weigh<typename Kind::A>(w, item, page, factor, rows.begin, rows.end);
    product<Kind>(value_product<Kind>(b, w, item, page), rows.end - rows.begin, b.v_width / kPanel);
  }
}

#if TM_HAS_TILES

// Rows of the outputs that whole tiles write beyond an item's rows.
static RowRange rows_beyond(const AttentionBlock& b, const Item& item) {
  const int tile = b.m_count < kTileRows ? b.m_count : kTileRows;
  const int count = item.rows.end - item.rows.begin;
  const int end = item.rows.begin + (count + tile - 1) / tile * tile;
  return {item.rows.end, end < b.m_count ? end : b.m_count};
}

// Scales the outputs for an item's products to be added to. A factor of 1 changes no bit and is
// left out: a row's maximum seldom grows after its first pages.
static TileProduct begin_values(const AttentionBlock& b, const Work& w, const Item& item,
                                const PageWork& page) {
  const int width = b.v_width;
  for (int r = item.rows.begin; r < item.rows.end; ++r) {
    const float factor = page.decay[r - item.first_row];
    if (factor == 1.0f) continue;
    float* out = w.split.out + r * width;
    for (int c = 0; c < width; c += kLanes) store(out + c, load(out + c) * broadcast(factor));
  }
  const RowRange beyond = rows_beyond(b, item);
  if (beyond.begin < beyond.end) {
    std::memcpy(w.saved, w.split.out + beyond.begin * width,
                sizeof(float) * width * (beyond.end - beyond.begin));
  }
  return {value_product<DotBf16>(b, w, item, page), item.rows.end - item.rows.begin,
          width / kPanel};
}

static void end_values(const AttentionBlock& b, const Work& w, const Item& item,
                       TileProduct& values) {
  while (tile_step(values)) {
  }
  const RowRange beyond = rows_beyond(b, item);
  if (beyond.begin >= beyond.end) return;
  std::memcpy(w.split.out + beyond.begin * b.v_width, w.saved,
              sizeof(float) * b.v_width * (beyond.end - beyond.begin));
}

static TileProduct begin_scores(const AttentionBlock& b, const Work& w, const Item& item,
                                const PageWork& page) {
  return {score_product<DotBf16>(b, w, item, page), item.rows.end - item.rows.begin,
          item.keys / kPanel};
}

// The softmax of an item, and between its pieces the steps of two products: tiles and vectors work
// side by side, for the pieces are short enough to be in the processor's window together.
static void softmax_beside(const AttentionBlock& b, const Work& w, const Item& item,
                           const PageWork& page, TileProduct& one, TileProduct& two) {
  constexpr int kPiece = 8;
  const float factor = cap_scores(b, item, page);
  mask_scores(b, item, page);
  for (int r = item.rows.begin; r < item.rows.end; r += kLanes) {
    const int end = r + kLanes < item.rows.end ? r + kLanes : item.rows.end;
    update_top(w, item, page, factor, r, end);
    for (int i = r; i < end; i += kPiece) {
      if (!tile_step(one)) tile_step(two);
      weigh<uint16_t>(w, item, page, factor, i, i + kPiece < end ? i + kPiece : end);
    }
    if (!tile_step(one)) tile_step(two);
  }
}

// The same results as take_items<DotBf16> has by other sums. Each item's softmax is computed beside
// the second product of the item before it and the first one of the item after it.
static void take_items_beside(const AttentionBlock& b, const Work& w, Items items) {
  Item before{}, item, after;
  if (!items.next(item)) return;
  TileProduct values{}, scores = begin_scores(b, w, item, w.page[0]);
  while (tile_step(scores)) {
  }
  bool first = true;
  for (int at = 0;; at ^= 1) {
    const bool more = items.next(after);
    scores = more ? begin_scores(b, w, after, w.page[at ^ 1]) : TileProduct{};
    softmax_beside(b, w, item, w.page[at], values, scores);
    if (!first) end_values(b, w, before, values);
    while (tile_step(scores)) {
    }
    values = begin_values(b, w, item, w.page[at]);
    first = false;
    before = item;
    if (!more) break;
    item = after;
  }
  end_values(b, w, before, values);
}

#endif

template <class Kind>
static void take_split(const AttentionBlock& b, const Work& w, int64_t first_key, int64_t last_key,
                       int64_t end_key) {
  const RowRange rows =
      rows_of(b, 0, b.m_count, first_key, static_cast<int>(last_key - first_key + 1));
  const int count = rows.end - rows.begin;
  std::memset(w.split.out + rows.begin * b.v_width, 0, sizeof(float) * b.v_width * count);
  std::memset(w.lanes + rows.begin * kLanes, 0, sizeof(float) * kLanes * count);
  for (int r = rows.begin; r < rows.end; ++r) w.split.top[r] = kLowest;
  const Items items{b, first_key / kPage, last_key / kPage, end_key / kPage};
#if TM_HAS_TILES
  if constexpr (std::is_same_v<Kind, DotBf16>) take_items_beside(b, w, items);
  if constexpr (!std::is_same_v<Kind, DotBf16>) take_items<Kind>(b, w, items);
#else
  take_items<Kind>(b, w, items);
#endif
  for (int r = rows.begin; r < rows.end; ++r) {
    w.split.sum[r] = reduce_add(load(w.lanes + r * kLanes));
  }
}

// The splits of keys [first, last], which lie in one span; returns where the rows' results are. The
// task goes on to key end_key.
template <class Kind>
static const RowParts& take_span(const AttentionBlock& b, const Work& w, int64_t first,
                                 int64_t last, int64_t end_key) {
  const int64_t first_split = first / kTaskSplitKeys, last_split = last / kTaskSplitKeys;
  for (int64_t split = first_split; split <= last_split; ++split) {
    const int64_t begin = split * kTaskSplitKeys, end = begin + kTaskSplitKeys - 1;
    take_split<Kind>(b, w, begin > first ? begin : first, end < last ? end : last, end_key);
    if (first_split == last_split) return w.split;
    merge_rows(b, w.span, w.split, begin, kTaskSplitKeys, first);
  }
  return w.span;
}

template <class Kind>
static void attend_as(const AttentionBlock& b, float* scratch) {
  const Work w = carve(scratch, b.k_width, b.v_width);
  copy_queries<typename Kind::A>(b, w);
#if TM_HAS_TILES
  tile_configure(b.m_count < kTileRows ? b.m_count : kTileRows);
#endif
  int64_t first = lowest_key(b, 0), last = query_of(b, b.m_count - 1);
  if (first < b.key_begin) first = b.key_begin;
  if (last >= b.key_end) last = b.key_end - 1;
  const int64_t first_span = first / kTaskSpanKeys, last_span = last / kTaskSpanKeys;
  const RowParts* result = &w.total;
  for (int64_t span = first_span; span <= last_span; ++span) {
    const int64_t begin = span * kTaskSpanKeys, end = begin + kTaskSpanKeys - 1;
    result = &take_span<Kind>(b, w, begin > first ? begin : first, end < last ? end : last, last);
    if (first_span == last_span) break;
    merge_rows(b, w.total, *result, begin, kTaskSpanKeys, first);
    result = &w.total;
  }
  if (b.partial) {
    store_partial(b, *result);
  } else {
    finish_rows(b, *result);
  }
}

static void attend(const AttentionBlock& b, float* scratch) {
  if (b.kv == DType::f32) return attend_as<FmaF32>(b, scratch);
  if (b.kv == DType::f16) return attend_as<FmaF16>(b, scratch);
#if TM_HAS_BF16_DOT
  attend_as<DotBf16>(b, scratch);
#else
  attend_as<FmaBf16>(b, scratch);
#endif
}

static void merge(const AttentionBlock& b, const AttentionUnits& units, float* scratch) {
  const Work w = carve(scratch, b.k_width, b.v_width);
  merge_units(b, units, w.span, w.total);
}

const AttentionKernels& attention_kernels() {
  static constexpr AttentionKernels table{kStepRows, kMostRows, scratch_floats, attend, merge};
  return table;
}

}  // namespace turbomind::TM_ISA_NS
