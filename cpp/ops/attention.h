// Attention of a step's queries over the K and V in pages. ops/rope_kv.h writes them.
#pragma once

#include <vector>

#include "cache/kv_layout.h"
#include "core/context.h"
#include "core/tensor.h"

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
