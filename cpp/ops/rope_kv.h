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

// Reads the fused projection qkv [rows, (heads + kv_heads) * k_dim + kv_heads * v_dim] float32:
// norms q and k per head (q_norm/k_norm kind none: skipped), rotates both, writes
// q [rows, heads * k_width] in the KV dtype's compute type (see attention_q_dtype; each head's
// columns padded with zeros to k_width), and rounds K and V into the pages.
// Throws Error(internal) for types and shapes that disagree.
void rope_write_kv(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
                   const PageView& pages, const SeqBatch& batch, const Mat& qkv, const Norm& q_norm,
                   const Norm& k_norm, const StepRope& rope, const Mat& q);

}  // namespace turbomind
