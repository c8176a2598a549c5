// The interface between rope_kv.cc and rope_kv_cpu.cc, which is compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace turbomind {

constexpr int kMaxHeadWidth = 1024;  // elements; bounds the kernels' stack buffers
// Tokens written by one task. Attention multiplies V in pieces of as many tokens, so a task that
// begins a piece clears it: what an earlier owner left in the page cannot reach a product. Nothing
// else clears pages. A sequence writes a page from its first slot on, or goes on in a copy of all
// of one, so every piece with a key that counts was cleared.
constexpr int kKvRun = 32;

struct RopeKvHeads {
  int heads, kv_heads;
  int k_dim, v_dim, k_width, v_width;
  DType kv;  // of K and V
  bool bf16_q;
  const float* q_weight;  // null: q is not normed
  const float* k_weight;
  float q_offset, k_offset, q_eps, k_eps;
  float v_eps;  // 0: V is not normed
  int half;     // rotated width / 2; 0: no rotation
  bool interleaved;
  size_t k_head_bytes, v_head_bytes;
};

// Up to kKvRun tokens of one sequence that share a piece of a page.
struct RopeKvRun {
  const float* qkv;  // of the first token
  int64_t qkv_stride;
  void* q;  // of the first token
  int64_t q_stride;
  const float* cos;  // [count, half]
  const float* sin;
  uint8_t* k_page;  // head 0's K block of this layer
  uint8_t* v_page;
  int slot;  // of the first token in its page
  int count;
};

struct RopeKvKernels {
  void (*write)(const RopeKvHeads& heads, const RopeKvRun& run);
};

}  // namespace turbomind
