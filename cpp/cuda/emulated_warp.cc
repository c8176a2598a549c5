#include "cuda/emulated_warp.h"

#include <cstring>

#include "core/dtype.h"

namespace turbomind::emulator {

void do_shuffle(const Warp& warp) {
  std::array<uint64_t, kWarp> values{};
  for (int i = 0; i < kWarp; ++i) {
    const Operands& o = warp.threads[i]->operands;
    std::memcpy(&values[i], o.in, o.bytes);
  }
  for (const Thread* t : warp.threads)
    std::memcpy(t->operands.out, &values[t->operands.number & (kWarp - 1)], t->operands.bytes);
}

void do_vote(const Warp& warp) {
  uint32_t votes = 0;
  for (int i = 0; i < kWarp; ++i)
    votes |= static_cast<uint32_t>(warp.threads[i]->operands.flag) << i;
  for (const Thread* t : warp.threads) std::memcpy(t->operands.out, &votes, sizeof votes);
}

namespace {

// Element `half` of a register pair of 16-bit elements.
float half_of(bool bf16, uint32_t bits, int half) {
  const uint16_t h = static_cast<uint16_t>(bits >> (16 * half));
  return bf16 ? bf16_to_f32(h) : f16_to_f32(h);
}

}  // namespace

// c += a b^T of [16, 16] and [8, 16], products added in ascending k. Lane 4 g + t holds of a, b the
// rows g (and g + 8 of a), of k the pairs 2 t and 2 t + 8; of c the columns 2 t, 2 t + 1.
void do_mma(const Warp& warp) {
  const bool bf16 = warp.threads[0]->operands.flag;
  float a[16][16], b[16][8], c[16][8];  // a [row][k], b [k][col]
  for (int lane = 0; lane < kWarp; ++lane) {
    const Operands& o = warp.threads[lane]->operands;
    const int g = lane / 4, t = lane % 4;
    uint32_t ra[4], rb[2];
    float rc[4];
    std::memcpy(ra, o.in, sizeof ra);
    std::memcpy(rb, o.in2, sizeof rb);
    std::memcpy(rc, o.out, sizeof rc);
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < 4; ++r)
        a[g + r % 2 * 8][2 * t + r / 2 * 8 + half] = half_of(bf16, ra[r], half);
      for (int r = 0; r < 2; ++r) b[2 * t + r * 8 + half][g] = half_of(bf16, rb[r], half);
      for (int r = 0; r < 2; ++r) c[g + r * 8][2 * t + half] = rc[2 * r + half];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int col = 0; col < 8; ++col) c[row][col] += a[row][k] * b[k][col];
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = lane % 4;
    const float rc[4] = {c[g][2 * t], c[g][2 * t + 1], c[g + 8][2 * t], c[g + 8][2 * t + 1]};
    std::memcpy(warp.threads[lane]->operands.out, rc, sizeof rc);
  }
}

// Matrix i is the eight 16-byte rows that lanes 8 i to 8 i + 7 point to. Lane 4 g + t gets of row g
// (transposed: column g) the elements 2 t and 2 t + 1.
void do_ldmatrix(const Warp& warp) {
  const bool transposed = warp.threads[0]->operands.flag;
  for (int i = 0; i < warp.threads[0]->operands.number; ++i) {
    uint16_t m[8][8];
    for (int r = 0; r < 8; ++r) std::memcpy(m[r], warp.threads[8 * i + r]->operands.in, 16);
    for (int lane = 0; lane < kWarp; ++lane) {
      const int g = lane / 4, t = 2 * (lane % 4);
      const uint32_t lo = transposed ? m[t][g] : m[g][t];
      const uint32_t hi = transposed ? m[t + 1][g] : m[g][t + 1];
      const uint32_t bits = lo | hi << 16;
      std::memcpy(static_cast<uint32_t*>(warp.threads[lane]->operands.out) + i, &bits, 4);
    }
  }
}

}  // namespace turbomind::emulator
