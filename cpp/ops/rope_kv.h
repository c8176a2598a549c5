// Rotation of q and k, and the write of K and V into pages.
#pragma once

#include "ops/attention.h"
#include "ops/norm.h"
#include "ops/rope.h"

namespace turbomind {

// The rotation of a step's rows; `table` null: none. On the CPU cos and sin
// [rows, inv_freq.size()] as rope_angles gives them; a GPU computes them from the table's inv_freq
// and positions [rows], both in device memory.
struct StepRope {
  const RopeTable* table = nullptr;
  const float* cos = nullptr;
  const float* sin = nullptr;
  const float* inv_freq = nullptr;
  const int32_t* positions = nullptr;
};

// Norms of single heads; of kind none: that one is skipped. V's has no weight.
struct HeadNorms {
  Norm q, k, v;
};

// Reads the fused projection qkv [rows, (heads + kv_heads) * k_dim + kv_heads * v_dim] float32:
// norms q, k and v per head, rotates q and k, writes
// q [rows, heads * k_width] in the KV dtype's compute type (see attention_q_dtype; each head's
// columns padded with zeros to k_width), and rounds K and V into the pages. Where qkv has q alone,
// [rows, heads * k_dim], the pages stay as they are.
// Throws Error(internal) for types and shapes that disagree.
void rope_write_kv(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
                   const PageView& pages, const SeqBatch& batch, const Mat& qkv,
                   const HeadNorms& norms, const StepRope& rope, const Mat& q);

}  // namespace turbomind
