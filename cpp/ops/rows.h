// Small ops over whole rows of activations.
#pragma once

#include "core/context.h"
#include "core/tensor.h"

namespace turbomind {

// y [count, cols] = rows ids[0..count) of x; same dtype and columns, padding included.
void gather_rows(Context& ctx, const Mat& x, const int32_t* ids, const Mat& y);

// y += scale * x; both float32 of one shape.
void add_scaled(Context& ctx, const Mat& x, float scale, const Mat& y);

// x = cap * tanh(x / cap), float32.
void soft_cap(Context& ctx, float cap, const Mat& x);

}  // namespace turbomind
