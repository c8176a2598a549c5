// Attention on the CPU: runs the tasks of a step on the context's threads.
#pragma once

#include "ops/attention.h"

namespace turbomind {

// As attention(), which has checked types and shapes.
void attention_on_host(Context& ctx, const AttentionShape& shape, const KvLayout& layout,
                       const PageView& pages, const SeqBatch& batch, const Mat& q, const Mat& out,
                       AttentionScratch& scratch);

}  // namespace turbomind
