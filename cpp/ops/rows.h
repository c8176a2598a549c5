// Small ops over whole rows of activations. All throw Error(internal) for types or shapes that
// they do not take.
#pragma once

#include "core/context.h"
#include "core/tensor.h"

namespace turbomind {

// y [count, cols] = rows ids[0..count) of x; any element type, the same for both, padding
// included. `ids` is memory of the context's device, all in range.
void gather_rows(Context& ctx, const Mat& x, const int32_t* ids, const Mat& y);

// y += scale * x; both float32 of one shape.
void add_scaled(Context& ctx, const Mat& x, float scale, const Mat& y);

// x = cap * tanh(x / cap) in place, float32 [rows, cols].
void soft_cap(Context& ctx, float cap, const Mat& x);

}  // namespace turbomind
