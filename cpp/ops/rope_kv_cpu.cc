#include "ops/rope_kv_kernels.h"

#include "cache/kv_layout.h"
#include "ops/norm_row.h"

namespace turbomind::TM_ISA_NS {

constexpr int kVSlots = kPageTokens;  // tokens between two 16-column panels of V

// Products and sums are rounded one by one, as the reference implementations do.
static void rotate_halves(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; i += kLanes) {
    const int n = half - i < kLanes ? half - i : kLanes;
    const VecF c = load_n(cos + i, n), s = load_n(sin + i, n);
    const VecF a = load_n(x + i, n), b = load_n(x + half + i, n);
    store_n(x + i, a * c - b * s, n);
    store_n(x + half + i, b * c + a * s, n);
  }
}

static void rotate_pairs(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

// x[0..dim) -> t[0..width): normed, rotated, padded with zeros.
static void prepare(const RopeKvHeads& h, const float* x, const float* weight, float offset,
                    float eps, const float* cos, const float* sin, float* t) {
  std::memcpy(t, x, sizeof(float) * h.k_dim);
  for (int i = h.k_dim; i < h.k_width; ++i) t[i] = 0;
  if (weight) rms_norm_in_place(t, h.k_dim, weight, offset, eps);
  if (h.half && h.interleaved) rotate_pairs(t, cos, sin, h.half);
  if (h.half && !h.interleaved) rotate_halves(t, cos, sin, h.half);
}

// Stores a vector of K or V in its 16-bit type.
static TM_INLINE void store_16(DType kv, uint16_t* p, VecF x) {
  if (kv == DType::f16) {
    store_f16(p, x);
  } else {
    store_bf16(p, x);
  }
}

static void write_k(const RopeKvHeads& h, const float* t, uint8_t* block, int slot) {
  const int group = slot / 16, lane = slot % 16;
  if (h.kv == DType::f32) {
    float* dst = reinterpret_cast<float*>(block) + group * h.k_width * 16 + lane;
    for (int i = 0; i < h.k_dim; ++i) dst[i * 16] = t[i];
    return;
  }
  uint16_t packed[kMaxHeadWidth];
  for (int i = 0; i < h.k_width; i += kLanes) store_16(h.kv, packed + i, load(t + i));
  uint8_t* dst = block + size_t{4} * (group * (h.k_width / 2) * 16 + lane);
  for (int i = 0; i < h.k_width / 2; ++i) std::memcpy(dst + size_t{64} * i, packed + 2 * i, 4);
}

static void write_v(const RopeKvHeads& h, const float* x, uint8_t* block, int slot) {
  for (int c = 0; c < h.v_dim; c += 16) {
    const int n = h.v_dim - c < 16 ? h.v_dim - c : 16;
    if (h.kv == DType::f32) {
      float* dst = reinterpret_cast<float*>(block) + c * kVSlots + slot * 16;
      std::memcpy(dst, x + c, sizeof(float) * n);
      continue;
    }
    uint16_t packed[16];
    for (int i = 0; i < n; i += kLanes) {
      store_16(h.kv, packed + i, load_n(x + c + i, n - i < kLanes ? n - i : kLanes));
    }
    uint16_t* dst = reinterpret_cast<uint16_t*>(block) + c * kVSlots + slot / 2 * 32 + slot % 2;
    for (int i = 0; i < n; ++i) dst[2 * i] = packed[i];
  }
}

// Zeroes kKvRun tokens, from `slot` on, of one head's K and V blocks.
static void clear_run(const RopeKvHeads& h, uint8_t* k, uint8_t* v, int slot) {
  const size_t bytes = dtype_bytes(h.kv);
  std::memset(k + slot * h.k_width * bytes, 0, kKvRun * h.k_width * bytes);
  for (int c = 0; c < h.v_width; c += 16) {
    std::memset(v + (c * kVSlots + slot * 16) * bytes, 0, kKvRun * 16 * bytes);
  }
}

static void write_q(const RopeKvHeads& h, const float* t, void* q, int64_t at) {
  for (int i = 0; i < h.k_width; i += kLanes) {
    if (h.bf16_q) {
      store_bf16(static_cast<uint16_t*>(q) + at + i, load(t + i));
    } else {
      store(static_cast<float*>(q) + at + i, load(t + i));
    }
  }
}

static void write(const RopeKvHeads& h, const RopeKvRun& run) {
  float t[kMaxHeadWidth];
  if (run.slot % kKvRun == 0) {
    for (int g = 0; g < h.kv_heads; ++g) {
      clear_run(h, run.k_page + g * h.k_head_bytes, run.v_page + g * h.v_head_bytes, run.slot);
    }
  }
  for (int i = 0; i < run.count; ++i) {
    const float* x = run.qkv + i * run.qkv_stride;
    const float* cos = run.cos + i * h.half;
    const float* sin = run.sin + i * h.half;
    for (int g = 0; g < h.heads; ++g, x += h.k_dim) {
      prepare(h, x, h.q_weight, h.q_offset, h.q_eps, cos, sin, t);
      write_q(h, t, run.q, i * run.q_stride + int64_t{g} * h.k_width);
    }
    for (int g = 0; g < h.kv_heads; ++g, x += h.k_dim) {
      prepare(h, x, h.k_weight, h.k_offset, h.k_eps, cos, sin, t);
      write_k(h, t, run.k_page + g * h.k_head_bytes, run.slot + i);
    }
    for (int g = 0; g < h.kv_heads; ++g, x += h.v_dim) {
      const float* v = x;
      if (h.v_eps > 0) {
        std::memcpy(t, x, sizeof(float) * h.v_dim);
        scale_to_unit_rms(t, h.v_dim, h.v_eps);
        v = t;
      }
      write_v(h, v, run.v_page + g * h.v_head_bytes, run.slot + i);
    }
  }
}

const RopeKvKernels& rope_kv_kernels() {
  static constexpr RopeKvKernels table{write};
  return table;
}

}  // namespace turbomind::TM_ISA_NS
