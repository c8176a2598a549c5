// Writing K and V into pages, and attention over pages.
#pragma once

#include "cache/kv_layout.h"
#include "core/context.h"
#include "core/tensor.h"
#include "ops/norm.h"
#include "ops/rope.h"

namespace turbomind {

// One sequence of a step, as one cache group sees it.
// Query row i of the sequence is row q_begin + i of the step and has index kv_begin + i in the
// sequence. Keys 0..kv_begin + q_len - 1 exist once this step's K and V are written.
// pages[j] holds tokens [64 j, 64 j + 64); entries of pages out of a window's reach are -1.
struct AttentionSeq {
  int64_t q_begin = 0;
  int64_t q_len = 0;
  int64_t kv_begin = 0;
  const int32_t* pages = nullptr;
};

struct AttentionBounds;
struct SeqArrays;

// The sequences of a step, as one cache group sees them: on the CPU `seqs`; on a GPU arrays in
// device memory, and what the host knows of them: bounds, and lengths for the profile (`seqs`
// without pages).
struct SeqBatch {
  const AttentionSeq* seqs = nullptr;
  int64_t count = 0;
  const SeqArrays* arrays = nullptr;
  const AttentionBounds* bounds = nullptr;
};

struct PageView {
  uint8_t* base = nullptr;  // page p of the group starts at base + p * page_bytes
  size_t page_bytes = 0;
};

struct AttentionShape {
  int heads = 0;
  int kv_heads = 0;
  int k_dim = 0;
  int v_dim = 0;
  float scale = 0;               // usually 1/sqrt(k_dim)
  float softcap = 0;             // 0: none; scores become cap * tanh(s / cap)
  int window = 0;                // 0: full
  const float* sinks = nullptr;  // [heads] extra logit in the softmax's denominator, or null
};

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

// Takes the fused projection qkv [rows, (heads + kv_heads) * k_dim + kv_heads * v_dim] float32:
// norms q and k per head (q_norm/k_norm kind none: skipped), rotates both, writes
// q [rows, heads * k_width] in the KV dtype's compute type (see attention_q_dtype; each head's
// columns padded with zeros to k_width), and rounds K and V into the pages.
void rope_write_kv(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
                   const PageView& pages, const SeqBatch& batch, const Mat& qkv, const Norm& q_norm,
                   const Norm& k_norm, const StepRope& rope, const Mat& q);

// On the CPU bfloat16 where the ISA multiplies bf16 directly and the KV is bf16, else float32; on a
// GPU the KV's own.
DType attention_q_dtype(const Context& ctx, DType kv_dtype);

// out [rows, heads * v_dim] float32 or bfloat16 (padded columns zero). Each row: online softmax
// over 64-token page blocks in order, merged in that order; the same bits whatever else is in the
// step. `scratch` belongs to the caller and is reused between calls.
struct AttentionScratch {
  std::vector<std::vector<float>> per_worker;
};
void attention(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
               const PageView& pages, const SeqBatch& batch, const Mat& q, const Mat& out,
               AttentionScratch& scratch);

}  // namespace turbomind
