// Token ids of a step that is submitted before the host has read the tokens of the step before it.
#pragma once

#include <cstdint>

#include "core/context.h"

namespace turbomind {

// token_ids[i] becomes sampled[from[i]], or 0 where that is negative: the row had no valid logits,
// and its results are discarded. Where from[i] is negative, token_ids[i] stays. from and token_ids
// are [count]; all are memory of the context's device.
void next_tokens(Context& ctx, const int32_t* from, const int32_t* sampled, int32_t* token_ids,
                 int32_t count);

}  // namespace turbomind
