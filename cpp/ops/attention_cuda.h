// Attention on a GPU: what its kernels are given, and how a step is cut into blocks.
//
// Keys are taken in splits of 128 tokens, counted from the sequence's first token. A split gives
// every query row a fresh (maximum, sum, output); splits are merged in order into spans of 8, spans
// in order into the result. Who merges differs: a block, or the merge kernel from a workspace. What
// is merged with what does not, so a row has the same bits as a decode row, in a chunk, alone or in
// a batch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "cuda/gpu.h"
#include "cuda/seq_arrays.h"
#include "cuda/types.h"

namespace turbomind {

class GpuContext;

constexpr int kSplitTokens = 128;  // two pages
constexpr int kSpanSplits = 8;
constexpr int kSpanTokens = kSplitTokens * kSpanSplits;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxHeadRows = 16;  // query heads that share one load of K and V; more take parts

// One layer's K and V in a cache group's pages, in canonical order: K [head][64 tokens][k_dim],
// then V [head][64 tokens][v_dim], 16-bit, real widths. Page p starts at base + p * page_bytes.
struct CudaPages {
  uint8_t* base;
  int64_t page_bytes;
  int64_t k_offset;  // of this layer's K of head 0 in a page, bytes; multiples of 16
  int64_t v_offset;
};

// Pointers are device pointers; `scale`, `softcap`, `window` and `sinks` as in AttentionShape.
struct AttentionCudaArgs {
  DType dtype;    // bf16 or f16: of q, out, K and V
  const void* q;  // [tokens, heads * k_dim]
  void* out;      // [tokens][out_stride], heads * v_dim of each row
  CudaPages pages;
  SeqArrays seqs;
  int heads;
  int kv_heads;
  int k_dim;  // multiples of 8, at most kMaxHeadDim
  int v_dim;
  float scale;
  float softcap;
  int window;
  const float* sinks;  // [heads] or null
  float* workspace;    // AttentionPlan::workspace_bytes, aligned to 16
  int out_stride = 0;  // elements, even; 0: heads * v_dim
  // Columns [heads * v_dim, out_zero_end) of a sequence's rows become zero; even, at most
  // kMaxHeadDim after the last head's. Work memory holds what rows of other widths left there.
  int out_zero_end = 0;
};

// Bounds of a step, or of all steps that replay a captured graph, on the host.
struct AttentionBounds {
  int num_seqs;
  int tokens;
  int64_t most_keys;   // of any sequence, this step's included
  bool decode = true;  // sequences with one query may occur
  bool chunks = true;  // sequences with more may occur
};

// How the work is cut. Any plan whose slots reach most_keys gives the same bits.
struct AttentionPlan {
  int parts;       // a kv head's query heads are taken in this many parts of at most 16
  int part_heads;  // query heads of a part; the last may have fewer

  // Sequences with one query: blocks (part, sequence, z), z of decode_blocks; each takes every
  // decode_blocks-th split (or span), and the merge kernel the partial results.
  bool decode;
  bool decode_spans;  // a partial result per span rather than per split
  int decode_slots;   // partial results of a row
  int decode_blocks;
  int decode_stages;  // of 16 KiB, the ring that K and V pass through

  // Sequences with more: blocks (tokens, part), or (tokens, part, span) and the merge kernel.
  bool chunks;
  int tile_warps;     // of 16 query rows
  int column_halves;  // warps that share 16 rows
  int tile_tokens;
  bool chunk_spans;
  int chunk_slots;
  int chunk_stages;
  bool chunk_totals;  // room in shared memory for what spans add up to

  size_t decode_shared_bytes;
  size_t chunk_shared_bytes;
  size_t workspace_bytes;
};

// Throws Error(internal) for shapes the kernels do not take.
AttentionPlan plan_attention(const AttentionCudaArgs& args, const AttentionBounds& bounds,
                             const GpuLimits& limits);

// Bytes of K and V that the kernels of a plan load: each visible key once per part and tile.
struct HostSeq {
  int64_t q_begin, q_len, kv_begin;
};
int64_t attention_kv_bytes(const AttentionCudaArgs& args, const AttentionPlan& plan,
                           const HostSeq* seqs, int num_seqs);

struct AttentionLaunch {
  AttentionCudaArgs args;
  AttentionPlan plan;
};

// Returns work memory of at least `bytes` bytes that all attention of a context shares. It stays
// valid until a larger one is asked for, or the context's release().
float* attention_workspace(GpuContext& gpu, size_t bytes);

// All of a step's attention, in the stream's order.
void attention(GpuKind kind, StreamHandle stream, const AttentionLaunch& launch);

struct AttentionCuda {
  void (*attention)(StreamHandle stream, const AttentionLaunch& launch);
};

}  // namespace turbomind
