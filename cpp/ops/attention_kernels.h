// The interface between attention.cc and attention_cpu.cc, which is compiled once per instruction
// set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace turbomind {

// A block of query rows that share one kv head of one sequence. The rows are numbered
// m = i * group + g, for query i of the sequence and head g of the kv head's group.
struct AttentionBlock {
  int group;
  int k_width, v_width, v_dim;
  DType kv;  // of K and V: float32 or bfloat16
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
  int m_count;  // 1..m_block
};

struct AttentionKernels {
  int m_block;
  size_t (*scratch_floats)(int k_width, int v_width);
  void (*attend)(const AttentionBlock& block, float* scratch);
};

}  // namespace turbomind
