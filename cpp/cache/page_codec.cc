#include "cache/page_codec.h"

#include <cstring>

#include "core/error.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace turbomind {

namespace {

// A word is the unit of the packed orders: one float32, or two 16-bit elements.
constexpr size_t kWord = 4;
constexpr int kPanel = 16;  // tokens of a K panel, columns of a V panel
constexpr size_t kLine = kPanel * kWord;

// Elements of one head in canonical order.
struct Rows {
  int count;  // tokens to convert
  int dim;
  size_t stride;  // bytes of a token
};

void copy_word(const uint8_t* from, uint8_t* to) {
  std::memcpy(to, from, kWord);
}

void copy_half(const uint8_t* from, uint8_t* to) {
  std::memcpy(to, from, kWord / 2);
}

// Transposes four words of each of four rows.
void transpose4(const uint8_t* in, size_t in_stride, uint8_t* out, size_t out_stride) {
#ifdef __SSE2__
  const auto row = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i * in_stride));
  };
  const auto put = [&](int i, __m128i v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * out_stride), v);
  };
  const __m128i r0 = row(0), r1 = row(1), r2 = row(2), r3 = row(3);
  const __m128i a = _mm_unpacklo_epi32(r0, r1), b = _mm_unpacklo_epi32(r2, r3);
  const __m128i c = _mm_unpackhi_epi32(r0, r1), d = _mm_unpackhi_epi32(r2, r3);
  put(0, _mm_unpacklo_epi64(a, b));
  put(1, _mm_unpackhi_epi64(a, b));
  put(2, _mm_unpacklo_epi64(c, d));
  put(3, _mm_unpackhi_epi64(c, d));
#else
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j)
      copy_word(in + i * in_stride + j * kWord, out + j * out_stride + i * kWord);
#endif
}

// Converts a panel of 16 rows: one line for each word of a row. `Write`: to the packed order.
template <bool Write>
void k_row(uint8_t* lines, uint8_t* row, size_t row_bytes) {
  size_t at = 0;
  for (; at + kWord <= row_bytes; at += kWord, lines += kLine)
    Write ? copy_word(row + at, lines) : copy_word(lines, row + at);
  if (at < row_bytes) Write ? copy_half(row + at, lines) : copy_half(lines, row + at);
}

template <bool Write>
void k_panel(uint8_t* panel, uint8_t* rows, const Rows& r) {
  const size_t words = r.stride / kWord / 4 * 4;
  for (size_t w = 0; w < words; w += 4)
    for (int t = 0; t < kPanel; t += 4) {
      uint8_t* packed = panel + w * kLine + t * kWord;
      uint8_t* plain = rows + t * r.stride + w * kWord;
      Write ? transpose4(plain, r.stride, packed, kLine)
            : transpose4(packed, kLine, plain, r.stride);
    }
  for (int t = 0; words * kWord < r.stride && t < kPanel; ++t)
    k_row<Write>(panel + words * kLine + t * kWord, rows + t * r.stride + words * kWord,
                 r.stride - words * kWord);
}

template <bool Write>
void k_block(const KvLayout& layout, uint8_t* block, uint8_t* rows, const Rows& r) {
  const size_t panel_bytes = layout.k_width() / layout.pair() * kLine;
  int t = 0;
  for (; t + kPanel <= r.count; t += kPanel, block += panel_bytes)
    k_panel<Write>(block, rows + t * r.stride, r);
  for (int lane = 0; t < r.count; ++t, ++lane)
    k_row<Write>(block + lane * kWord, rows + t * r.stride, r.stride);
}

// Eight columns of two tokens, 16-bit: a0 b0 a1 b1 ... in a line.
void interleave8(const uint8_t* a, const uint8_t* b, uint8_t* line) {
#ifdef __SSE2__
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
  const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(line), _mm_unpacklo_epi16(x, y));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(line + 16), _mm_unpackhi_epi16(x, y));
#else
  for (int i = 0; i < 8; ++i) {
    copy_half(a + 2 * i, line + 4 * i);
    copy_half(b + 2 * i, line + 4 * i + 2);
  }
#endif
}

void separate8(const uint8_t* line, uint8_t* a, uint8_t* b) {
#ifdef __SSE2__
  // a0 b0 a1 b1 a2 b2 a3 b3 -> a0 a1 a2 a3 b0 b1 b2 b3
  const auto sort = [](const uint8_t* p) {
    __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    v = _mm_shufflehi_epi16(_mm_shufflelo_epi16(v, 0xD8), 0xD8);
    return _mm_shuffle_epi32(v, 0xD8);
  };
  const __m128i x = sort(line), y = sort(line + 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(a), _mm_unpacklo_epi64(x, y));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(b), _mm_unpackhi_epi64(x, y));
#else
  for (int i = 0; i < 8; ++i) {
    copy_half(line + 4 * i, a + 2 * i);
    copy_half(line + 4 * i + 2, b + 2 * i);
  }
#endif
}

// Converts a panel's 16-bit columns, of the rows from `rows` on.
template <bool Write>
void v_panel(uint8_t* panel, uint8_t* rows, int columns, const Rows& r) {
  int t = 0;
  for (; t + 2 <= r.count; t += 2, panel += kLine) {
    uint8_t *a = rows + t * r.stride, *b = a + r.stride;
    int c = 0;
    for (; c + 8 <= columns; c += 8)
      Write ? interleave8(a + 2 * c, b + 2 * c, panel + 4 * c)
            : separate8(panel + 4 * c, a + 2 * c, b + 2 * c);
    for (; c < columns; ++c) {
      uint8_t *x = a + 2 * c, *y = b + 2 * c, *packed = panel + 4 * c;
      Write ? copy_half(x, packed) : copy_half(packed, x);
      Write ? copy_half(y, packed + 2) : copy_half(packed + 2, y);
    }
  }
  for (int c = 0; t < r.count && c < columns; ++c) {
    uint8_t *x = rows + t * r.stride + 2 * c, *packed = panel + 4 * c;
    Write ? copy_half(x, packed) : copy_half(packed, x);
  }
}

// The same for float32, whose rows follow each other.
template <bool Write>
void v_panel_f32(uint8_t* panel, uint8_t* rows, int columns, const Rows& r) {
  for (int t = 0; t < r.count; ++t) {
    uint8_t *plain = rows + t * r.stride, *packed = panel + t * kLine;
    if (columns == kPanel)
      Write ? std::memcpy(packed, plain, kLine) : std::memcpy(plain, packed, kLine);
    else
      Write ? std::memcpy(packed, plain, columns * kWord)
            : std::memcpy(plain, packed, columns * kWord);
  }
}

template <bool Write>
void v_block(const KvLayout& layout, uint8_t* block, uint8_t* rows, const Rows& r) {
  const size_t element = dtype_bytes(layout.dtype);
  for (int c = 0; c < r.dim; c += kPanel) {
    uint8_t* panel = block + c * layout.page_tokens * element;
    const int columns = r.dim - c < kPanel ? r.dim - c : kPanel;
    if (element == kWord)
      v_panel_f32<Write>(panel, rows + c * element, columns, r);
    else
      v_panel<Write>(panel, rows + c * element, columns, r);
  }
}

// Both directions share their loops; the side that is read is not written.
template <bool Write>
void convert(const std::vector<KvLayout>& layers, uint8_t* page, uint8_t* plain, int count,
             int stored) {
  for (const KvLayout& layout : layers) {
    const size_t element = dtype_bytes(layout.dtype);
    const bool whole = count == layout.page_tokens;
    const Rows k{count, layout.k_dim, layout.k_dim * element};
    const Rows v{count, layout.v_dim, layout.v_dim * element};
    const size_t k_head = stored * k.stride, v_head = stored * v.stride;
    uint8_t* k_plain = plain + layout.slice.first * k_head;
    uint8_t* v_plain = plain + layout.stored_heads() * k_head + layout.slice.first * v_head;
    plain += layout.stored_heads() * (k_head + v_head);
    if (!Write && !layout.slice.reads) continue;
    for (int h = 0; h < layout.kv_heads; ++h, k_plain += k_head) {
      uint8_t* block = page + layout.k_offset(h);
      if (Write && !(whole && layout.k_dim == layout.k_width()))
        std::memset(block, 0, layout.k_head_bytes());
      k_block<Write>(layout, block, k_plain, k);
    }
    for (int h = 0; h < layout.kv_heads; ++h, v_plain += v_head) {
      uint8_t* block = page + layout.v_offset(h);
      if (Write && !(whole && layout.v_dim == layout.v_width()))
        std::memset(block, 0, layout.v_head_bytes());
      v_block<Write>(layout, block, v_plain, v);
    }
  }
}

}  // namespace

PageCodec::PageCodec(std::vector<KvLayout> layers) : layers_(std::move(layers)) {
  for (const KvLayout& l : layers_) {
    token_bytes_ +=
        l.stored_heads() * static_cast<size_t>(l.k_dim + l.v_dim) * dtype_bytes(l.dtype);
    page_tokens_ = l.page_tokens;
  }
}

void PageCodec::check(int count, int most) const {
  if (count < 1 || count > most || most > page_tokens_)
    throw_error(ErrorCode::internal, "page codec: ", count, " of ", most, " tokens, expected 1 to ",
                page_tokens_);
}

void PageCodec::read(const uint8_t* page, int count, uint8_t* out) const {
  check(count, page_tokens_);
  convert<false>(layers_, const_cast<uint8_t*>(page), out, count, count);
}

void PageCodec::write(uint8_t* page, int count, const uint8_t* in, int stored) const {
  check(count, stored);
  convert<true>(layers_, page, const_cast<uint8_t*>(in), count, stored);
}

}  // namespace turbomind
