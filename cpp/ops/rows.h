// Small ops over whole rows of activations. All throw Error(internal) for types or shapes that
// they do not take.
#pragma once

#include <vector>

#include "core/context.h"
#include "core/tensor.h"

namespace turbomind {

// y [count, cols] = rows ids[0..count) of x; any element type, the same for both, padding
// included. `ids` is memory of the context's device, all in range.
void gather_rows(Context& ctx, const Mat& x, const int32_t* ids, const Mat& y);

// y += scale * x, then y *= *factor unless it is null; both float32 of one shape. `factor` is
// memory of the context's device.
void add_scaled(Context& ctx, const Mat& x, float scale, const Mat& y,
                const float* factor = nullptr);

// y = scale * (the sum of `parts` in their order), or y += it; all float32 of one shape. On the
// CPU.
void sum_rows(Context& ctx, const std::vector<Mat>& parts, float scale, bool add, const Mat& y);

// x = scale * x, then cap * tanh(x / cap) unless cap is 0; in place, float32 [rows, cols].
void scale_and_cap(Context& ctx, float scale, float cap, const Mat& x);

}  // namespace turbomind
