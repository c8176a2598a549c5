// Fills the arguments that all kernels over pages share: the heads, and the offsets of their K and
// V.
#pragma once

#include "ops/attention.h"
#include "ops/attention_cuda.h"

namespace turbomind {

// AttentionCudaArgs or RopeKvCudaArgs, the rest of it zero.
template <typename Args>
Args kv_args_cuda(const AttentionShape& shape, const KvLayout& layout, const PageView& pages,
                  const SeqBatch& batch) {
  Args a{};
  a.dtype = layout.dtype;
  a.pages = {pages.base, static_cast<int64_t>(pages.page_bytes),
             static_cast<int64_t>(layout.k_offset(0)), static_cast<int64_t>(layout.v_offset(0))};
  a.seqs = *batch.arrays;
  a.heads = shape.heads;
  a.kv_heads = shape.kv_heads;
  a.k_dim = shape.k_dim;
  a.v_dim = shape.v_dim;
  return a;
}

}  // namespace turbomind
