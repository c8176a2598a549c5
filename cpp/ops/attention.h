// Attention of a step's queries over the K and V in pages. ops/rope_kv.h writes them.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "cache/kv_layout.h"
#include "core/context.h"
#include "core/memory.h"
#include "core/tensor.h"
#include "ops/attention_tasks.h"

namespace turbomind {

// One sequence of a step, in one cache group.
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

// The sequences of a step, in one cache group: on the CPU `seqs`; on a GPU `arrays` in device
// memory, and on the host their `bounds`, and `seqs` without pages for the profile.
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

// Returns the element type of q: on the CPU bfloat16 where the instruction set multiplies bfloat16
// directly and the KV is bfloat16, else float32; on a GPU the KV's own.
DType attention_q_dtype(const Context& ctx, DType kv_dtype);

// Work memory of the CPU's kernels. It belongs to the caller and is reused between calls. Its size
// is that of attention_scratch_bytes() and does not depend on the steps.
struct AttentionScratch {
  std::vector<std::vector<float>> per_worker;
  AttentionTasks tasks;
  HugeBuffer partials;                               // of rows whose keys several tasks take
  std::unique_ptr<std::atomic<int32_t>[]> finished;  // units of a block, of the same rows
};

// Returns the bytes of an AttentionScratch once heads of these widths have used it.
size_t attention_scratch_bytes(Isa isa, int workers, int k_dim, int v_dim);

// Writes out [rows, heads * v_dim]: on the CPU float32 or bfloat16, on a GPU of the KV's type;
// padded columns become zero. q [rows, heads * k_width] is what rope_write_kv wrote.
// Each row is a fixed tree over its keys (ops/attention_tasks.h on the CPU, ops/attention_cuda.h on
// a GPU): the same bits whatever else is in the step. Throws Error(internal) for types and shapes
// that disagree.
void attention(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
               const PageView& pages, const SeqBatch& batch, const Mat& q, const Mat& out,
               AttentionScratch& scratch);

}  // namespace turbomind
