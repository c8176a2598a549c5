// The interface between attention_host.cc and attention_cpu.cc, which is compiled once per
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace turbomind {

// Eight pages: a merge costs a row a fraction of a percent of the work of its split, and one
// sequence of 64k tokens with 2 KV heads still has 256 tasks.
constexpr int kTaskSplitKeys = 512;
constexpr int kTaskSpanKeys = 8 * kTaskSplitKeys;

// A block of query rows that share one kv head of one sequence. The rows are numbered
// m = i * group + g, for query i of the sequence and head g of the kv head's group.
struct AttentionBlock {
  int group;
  int k_width, v_width, v_dim;
  DType kv;  // of K and V
  bool bf16_out;
  float scale, softcap;
  int window;
  const float* sinks;  // of the group's first head, or null
  const void* q;       // query 0 of the sequence, the group's first head
  int64_t q_stride;    // elements between queries
  void* out;
  int64_t out_stride;
  const int32_t* pages;
  const uint8_t* base;
  size_t page_bytes, k_offset, v_offset;  // offsets of the kv head's blocks in a page
  int64_t kv_begin;
  int64_t m_begin;
  int m_count;                 // 1..most_rows
  int64_t key_begin, key_end;  // keys to take; borders of a split or span, or of all keys
  // Null: the rows' results go to `out`. Else to here, to be merged: outputs [m_count][v_width],
  // then maxima [m_count], then sums [m_count]. Rows that see none of the keys are left out.
  float* partial;
};

constexpr int kPartialState = 2;  // floats of a row's maximum and sum

// Partial results of units of keys, from AttentionBlock::partial on.
struct AttentionUnits {
  int64_t first;   // index of the first unit
  int keys;        // kTaskSplitKeys or kTaskSpanKeys
  int64_t stride;  // floats between units
};

struct AttentionKernels {
  int step_rows, most_rows;
  size_t (*scratch_floats)(int k_width, int v_width);
  void (*attend)(const AttentionBlock& block, float* scratch);
  // Merges the units that each row sees, and writes the rows' results to `out`.
  void (*merge)(const AttentionBlock& block, const AttentionUnits& units, float* scratch);
};

}  // namespace turbomind
