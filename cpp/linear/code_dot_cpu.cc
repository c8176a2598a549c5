// Integer codes times int8 activations: VNNI where the set has it, else maddubs, else plain C. Sums
// of a group are exact in all of them; groups are merged in float32, K ascending.
#include "cpu/vec_int.h"
#include "linear/linear_loop.h"

namespace turbomind::TM_ISA_NS {

namespace {

#define TM_HAS_MADDUBS (TM_HAS_AVX2 && !TM_HAS_BF16_DOT)

// ---- x

// Rounds `width` values that share a scale. A NaN or an infinity makes the scale NaN, and with it
// every result of the row.
void round_group(const CodeLayout& layout, const float* x, int64_t width, int8_t* codes,
                 XGroup* groups) {
  VecF top = zero(), poison = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    const VecF v = load(x + i);
    top = max(abs(v), top);
    poison = fma(v, zero(), poison);
  }
  const float largest = reduce_max(top), nan = reduce_add(poison);
  const bool finite = nan == 0;
  const VecF inverse = broadcast(largest >= 1e-36f ? 127.0f / largest : 0.0f);
  const float scale = largest / 127.0f + nan;
  for (int64_t g = 0; g < width; g += layout.group) {
    VecF sum = zero();
    for (int64_t i = g; i < g + layout.group; i += kLanes) {
      const VecF code = finite ? round_even(load(x + i) * inverse) : zero();
      sum = sum + code;  // exact: at most 256 * 127
      store_int8(codes + i, code);
    }
    const float total = reduce_add(sum);
    *groups++ = {scale, scale * total, -layout.bias() * static_cast<int32_t>(total)};
  }
}

void round_row(const CodeLayout& layout, const float* x, int64_t k, int8_t* codes, XGroup* groups) {
  const int64_t width = layout.x_group(), padded = layout.k_blocks(k) * layout.k_block();
  for (int64_t begin = 0; begin < padded; begin += width) {
    float last[kSuperBlock];
    const float* values = x + begin;
    if (begin + width > k) {
      for (int64_t i = 0; i < width; ++i) last[i] = begin + i < k ? x[begin + i] : 0.0f;
      values = last;
    }
    round_group(layout, values, width, codes + begin, groups + begin / layout.group);
  }
}

// ---- products of lines

// As they lie in memory: bytes; two lines of halves in one; and such halves unpacked into bytes.
enum class Codes { bytes, halves, small };

#if TM_HAS_MADDUBS
#if TM_HAS_AVX512
TM_INLINE VecI pair_sums(VecI codes, VecI x) {
  return _mm512_maddubs_epi16(codes, x);
}
TM_INLINE VecI add_pairs(VecI sum, VecI pairs) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
TM_INLINE VecI add_int16(VecI a, VecI b) {
  return _mm512_add_epi16(a, b);
}
// Signed codes: maddubs takes unsigned ones, so x takes their sign.
struct SignedLine {
  VecI magnitude;
  __mmask64 negative;
};
TM_INLINE SignedLine signed_line(VecI codes, VecI flip) {
  const VecI w = _mm512_xor_si512(codes, flip);
  return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
TM_INLINE VecI dot(VecI sum, const SignedLine& w, VecI x) {
  const VecI signed_x = _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
  return add_pairs(sum, pair_sums(w.magnitude, signed_x));
}
#else
TM_INLINE VecI pair_sums(VecI codes, VecI x) {
  return _mm256_maddubs_epi16(codes, x);
}
TM_INLINE VecI add_pairs(VecI sum, VecI pairs) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
TM_INLINE VecI add_int16(VecI a, VecI b) {
  return _mm256_add_epi16(a, b);
}
struct SignedLine {
  VecI magnitude, codes;
};
TM_INLINE SignedLine signed_line(VecI codes, VecI flip) {
  const VecI w = _mm256_xor_si256(codes, flip);
  return {_mm256_abs_epi8(w), w};
}
TM_INLINE VecI dot(VecI sum, const SignedLine& w, VecI x) {
  return add_pairs(sum, pair_sums(w.magnitude, _mm256_sign_epi8(x, w.codes)));
}
#endif
// Codes of 8 bits are signed bytes here, so that no sum of theirs starts from a bias.
constexpr bool kSignedBytes = true;
#else
constexpr bool kSignedBytes = false;
#if TM_HAS_BF16_DOT
// The instruction adds to its first operand. gcc 12 gives the intrinsic another register for the
// result, and copies or spills most of 24 sums at every line.
TM_INLINE VecI dot(VecI sum, VecI codes, VecI x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
  return sum;
}
#else
TM_INLINE VecI dot(VecI sum, VecI codes, VecI x) {
  uint8_t w[kVecBytes];
  int8_t a[kVecBytes];
  int32_t s[kLanes];
  std::memcpy(w, &codes, sizeof w);
  std::memcpy(a, &x, sizeof a);
  std::memcpy(s, &sum, sizeof s);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) s[i] += int32_t{w[4 * i + j]} * a[4 * i + j];
  std::memcpy(&sum, s, sizeof s);
  return sum;
}
#endif
#endif

// The codes of one group in the panels of a register block, and x of its rows.
struct Lines {
  const uint8_t* codes;
  int64_t panel_bytes;
  const int8_t* x;
  int64_t x_stride;
};

// Adds one line of each panel, at `w`, times the four values of each row at `x`.
template <int R, int V, bool kSmall>
struct LineSums {
#if TM_HAS_MADDUBS
  // Products of codes up to 15 fit int16 for 8 lines: 8 * 2 * 15 * 127.
  VecI pairs[R][V];
  VecI flip;
  TM_INLINE void begin() {
    if constexpr (kSmall) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) pairs[r][v] = broadcast_int(0);
      }
    }
  }
  TM_INLINE void add(VecI (&sum)[R][V], const VecI (&w)[V], const int8_t* x, int64_t x_stride) {
    if constexpr (kSmall) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const VecI four = broadcast_four(x + r * x_stride);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) pairs[r][v] = add_int16(pairs[r][v], pair_sums(w[v], four));
      }
    } else {
      SignedLine line[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) line[v] = signed_line(w[v], flip);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const VecI four = broadcast_four(x + r * x_stride);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[r][v] = dot(sum[r][v], line[v], four);
      }
    }
  }
  TM_INLINE void end(VecI (&sum)[R][V]) {
    if constexpr (kSmall) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sum[r][v] = add_pairs(sum[r][v], pairs[r][v]);
      }
    }
  }
#else
  VecI flip;
  TM_INLINE void begin() {}
  TM_INLINE void add(VecI (&sum)[R][V], const VecI (&w)[V], const int8_t* x, int64_t x_stride) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VecI four = broadcast_four(x + r * x_stride);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = dot(sum[r][v], w[v], four);
    }
  }
  TM_INLINE void end(VecI (&)[R][V]) {}
#endif
};

// ---- scales

// The scales and minima of kLanes outputs of one group, from output `lane` of the panel on.
struct GroupScales {
  VecF scale, minimum;
};

TM_INLINE VecF load_scale(ScaleType type, const uint8_t* p) {
  if (type == ScaleType::f32) return load(reinterpret_cast<const float*>(p));
  const auto* half = reinterpret_cast<const uint16_t*>(p);
  return type == ScaleType::f16 ? load_f16(half) : load_bf16(half);
}

// `block`: the K block of the panel; `row_scales`: where the panel has its scales of whole rows.
TM_INLINE GroupScales load_scales(const CodeLayout& layout, const uint8_t* block,
                                  const uint8_t* row_scales, int64_t group, int lane) {
  if (layout.row_scales) return {load(reinterpret_cast<const float*>(row_scales) + lane), zero()};
  const int64_t bytes = scale_bytes(layout.scales);
  const uint8_t* scales = block + layout.scales_at() + group * kPanel * bytes + lane * bytes;
  const uint8_t* offsets = block + layout.offsets_at() + group * layout.group_offset_bytes();
  if (layout.scales == ScaleType::factor) {
    const auto* super = reinterpret_cast<const uint16_t*>(block + layout.super_at()) + lane;
    const VecF scale = load_int8(scales) * load_f16(super);
    if (layout.offsets == Offsets::none) return {scale, zero()};
    return {scale, zero() - load_int8(offsets + lane) * load_f16(super + kPanel)};
  }
  const VecF scale = load_scale(layout.scales, scales);
  if (layout.offsets == Offsets::none) return {scale, zero()};
  if (layout.offsets == Offsets::minimum)
    return {scale, load_scale(layout.scales, offsets + lane * bytes)};
  const VecF bias = broadcast(static_cast<float>(layout.bias()));
  return {scale, scale * (bias - load_uint8(offsets + lane))};
}

// ---- the kernel

// The panels of a register block, for the K blocks of one visit.
struct Operands {
  const uint8_t* w;                  // packed
  const uint8_t* row_scales;         // of the first panel
  const uint8_t* codes;              // of the same blocks: those in w, or unpacked ones
  int64_t codes_panel, codes_block;  // bytes from one panel, and from one K block, to the next
  const int8_t* x;
  const XGroup* groups;
};

template <int kBits>
struct CodeKernel {
  static constexpr int kRows = TM_HAS_BF16_DOT ? 6 : TM_HAS_AVX2 ? 4 : 2;
  static constexpr int kRowAlign = 1;
  static constexpr int kPanels = TM_HAS_AVX512 ? 4 : 2;
  // Panels at once; with few rows more, so that enough sums are under way.
  static constexpr int block_panels(int rows) {
    return TM_HAS_AVX512 ? 4 : rows <= (TM_HAS_AVX2 ? 2 : 1) ? 2 : 1;
  }
  static constexpr bool kPipelined = false;
  static constexpr bool kUnpacks = kBits == 4;

  static void begin(const LinearPiece&) {}

  // Codes of 4 bits as bytes, for all rows of a piece: [panel][k block][line].
  static void unpack(const LinearJob& job, const Visit& v, const uint8_t* w, uint8_t* out) {
    const int64_t code_bytes = job.codes.code_bytes();
    for (int c = 0; c < v.panels; ++c) {
      for (int64_t b = 0; b < v.k_end - v.k_begin; ++b) {
        const uint8_t* codes = w + c * job.panel_bytes + b * job.k_block_bytes;
        uint8_t* to = out + c * unpacked_panel(job) + b * 2 * code_bytes;
        for (int64_t i = 0; i < code_bytes; i += 64) {
          for (int half = 0; half < 64; half += kVecBytes) {
            const VecI line = load_line(codes + i + half);
            store_line(to + 2 * i + half, low_halves(line));
            store_line(to + 2 * i + 64 + half, high_halves(line));
          }
        }
      }
    }
  }
  static int64_t unpacked_panel(const LinearJob& job) {
    return job.order.chunk_k_blocks * 2 * job.codes.code_bytes();
  }

  // Adds one group to acc. `offset`: of its first line in the visit's blocks, for the prefetch.
  template <int R, int C, Codes kCodes>
  TM_INLINE static void add_group(const LinearJob& job, const Lines& at, const Prefetch& prefetch,
                                  int64_t offset, const XGroup* groups,
                                  VecI (&sum)[R][C * kPanelVecs]) {
    constexpr int V = C * kPanelVecs;
    const bool biased = kBits == 4 || !kSignedBytes;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VecI start = broadcast_int(biased ? groups[r * job.x_groups_stride].bias : 0);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = start;
    }
    LineSums<R, V, kBits == 4> sums;
    sums.flip = broadcast_int(job.codes.bias() == 128 ? static_cast<int32_t>(0x80808080u) : 0);
    const int lines = static_cast<int>(job.codes.group / 4);
    const int8_t* x = at.x;
    for (int begin = 0; begin < lines; begin += 8) {
      const int end = lines < begin + 8 ? lines : begin + 8;
      sums.begin();
      constexpr int kStep = kCodes == Codes::halves ? 2 : 1;
      for (int l = begin; l < end; l += kStep, x += 4 * kStep) {
        const uint8_t* line = at.codes + l / kStep * 64;
        if (kCodes != Codes::small || l % 2 == 0)
          fetch(prefetch, job.panel_bytes, offset + l / (kBits == 4 ? 2 : 1) * 64);
        VecI w[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
          w[v] = load_line(line + v / kPanelVecs * at.panel_bytes + v % kPanelVecs * kVecBytes);
        }
        if constexpr (kCodes == Codes::halves) {
          VecI half[V];
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) half[v] = low_halves(w[v]);
          sums.add(sum, half, x, at.x_stride);
#pragma GCC unroll 8
          for (int v = 0; v < V; ++v) half[v] = high_halves(w[v]);
          sums.add(sum, half, x + 4, at.x_stride);
        } else {
          sums.add(sum, w, x, at.x_stride);
        }
      }
      sums.end(sum);
    }
  }

  template <int R, int C>
  TM_INLINE static void merge(const LinearJob& job, const Operands& at, int64_t block,
                              int64_t group, const XGroup* groups,
                              const VecI (&sum)[R][C * kPanelVecs], bool from_zero, float* acc,
                              int64_t acc_stride) {
    const CodeLayout& layout = job.codes;
    const bool has_minimum = layout.offsets != Offsets::none;
#pragma GCC unroll 8
    for (int v = 0; v < C * kPanelVecs; ++v) {
      const int64_t panel = v / kPanelVecs * job.panel_bytes;
      const GroupScales s = load_scales(layout, at.w + panel + block * job.k_block_bytes,
                                        at.row_scales + panel, group, v % kPanelVecs * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const XGroup& x = groups[r * job.x_groups_stride];
        float* to = acc + r * acc_stride + v * kLanes;
        VecF total = from_zero ? zero() : load(to);
        total = fma(to_float(sum[r][v]), s.scale * broadcast(x.scale), total);
        if (has_minimum) total = fma(s.minimum, broadcast(x.sum), total);
        store(to, total);
      }
    }
  }

  template <int R, int C, Codes kCodes>
  [[gnu::noinline]] static void product(const LinearJob& job, const Visit& v, const Operands& at,
                                        float* acc, int64_t acc_stride, const Prefetch& prefetch) {
    const CodeLayout& layout = job.codes;
    const int64_t groups = layout.groups(), blocks = v.k_end - v.k_begin;
    const int64_t line_bytes = layout.group * 16 * (kCodes == Codes::halves ? 4 : 8) / 8;
    const int64_t packed_bytes = layout.group * 16 * kBits / 8;
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t index = b * groups + g;
        const Lines lines = {at.codes + b * at.codes_block + g * line_bytes, at.codes_panel,
                             at.x + index * layout.group, job.x_stride};
        VecI sum[R][C * kPanelVecs];
        add_group<R, C, kCodes>(job, lines, prefetch, b * job.k_block_bytes + g * packed_bytes,
                                at.groups + index, sum);
        merge<R, C>(job, at, b, g, at.groups + index, sum, v.k_begin == 0 && index == 0, acc,
                    acc_stride);
      }
      for (int64_t i = layout.code_bytes(); i < job.k_block_bytes; i += 64)
        fetch(prefetch, job.panel_bytes, b * job.k_block_bytes + i);
    }
  }

  template <int R, Codes kCodes>
  static void rows_block(const LinearJob& job, const Visit& v, Operands at, float* acc,
                         int64_t acc_stride, Prefetch prefetch) {
    constexpr int kAtOnce = block_panels(R);
    const auto advance = [&](int panels) {
      at.w += panels * job.panel_bytes;
      at.row_scales += panels * job.panel_bytes;
      at.codes += panels * at.codes_panel;
      acc += panels * 16;
      prefetch.panels = 0;
    };
    int c = 0;
    for (; c + kAtOnce <= v.panels; c += kAtOnce, advance(kAtOnce))
      product<R, kAtOnce, kCodes>(job, v, at, acc, acc_stride, prefetch);
    for (; c < v.panels; ++c, advance(1))
      product<R, 1, kCodes>(job, v, at, acc, acc_stride, prefetch);
  }

  template <int R = kRows>
  static void block(const LinearJob& job, const Visit& v, const uint8_t* w, const uint8_t* unpacked,
                    float* acc, int64_t acc_stride, const Prefetch& prefetch,
                    Unfinished& unfinished) {
    if constexpr (R > 1) {
      if (v.rows < R)
        return block<R - 1>(job, v, w, unpacked, acc, acc_stride, prefetch, unfinished);
    }
    Operands at;
    at.w = w;
    at.row_scales = w + job.panel_bytes - v.k_begin * job.k_block_bytes - kPanel * 4;
    at.codes = unpacked ? unpacked : w;
    at.codes_panel = unpacked ? unpacked_panel(job) : job.panel_bytes;
    at.codes_block = unpacked ? 2 * job.codes.code_bytes() : job.k_block_bytes;
    at.x = reinterpret_cast<const int8_t*>(job.x) + v.row * job.x_stride +
           v.k_begin * job.codes.k_block();
    at.groups = job.x_groups + v.row * job.x_groups_stride + v.k_begin * job.codes.groups();
    if constexpr (kBits == 8) {
      rows_block<R, Codes::bytes>(job, v, at, acc, acc_stride, prefetch);
    } else if (unpacked) {
      rows_block<R, Codes::small>(job, v, at, acc, acc_stride, prefetch);
    } else {
      rows_block<R, Codes::halves>(job, v, at, acc, acc_stride, prefetch);
    }
  }
  static void block(const LinearJob& job, const Visit& v, const uint8_t* w, float* acc,
                    int64_t acc_stride, const Prefetch& prefetch, Unfinished& unfinished) {
    block<kRows>(job, v, w, nullptr, acc, acc_stride, prefetch, unfinished);
  }
};

// Chunks of 2048 values of K of four panels are 128 KiB as bytes, an eighth of the second-level
// cache.
template <class K>
constexpr LinearKernel kernel_of() {
  LinearKernel kernel = {K::kRows,    K::kPanels, 16,    K::kPanels,
                         XType::int8, false,      false, run_piece<K>};
  kernel.round_row = round_row;
  return kernel;
}

constexpr LinearKernel kEight = kernel_of<CodeKernel<8>>();
constexpr LinearKernel kFour = kernel_of<CodeKernel<4>>();

}  // namespace

const CodeKernels& code_kernel_table() {
  static constexpr CodeKernels table = {&kEight, &kFour};
  return table;
}

}  // namespace turbomind::TM_ISA_NS
