// y = x W^T with bias, addend and epilogue. Formats and kernels are in cpp/linear.
#pragma once

#include "linear/weight_format.h"

namespace turbomind {

// x [m, k] float32 or 16-bit; y [m, n], or [m, n/2] where the epilogue is gated. `op` is what the
// profile counts it as. Checks shapes and types (Error(internal) names what differs), then calls
// the weight's format. m == 0 is allowed and does nothing.
void linear(Context& ctx, Op op, const LinearWeight& w, const Mat& x, const Mat& y,
            const LinearArgs& args = {});

// Rows [begin[i], begin[i + 1]) of y are the product of those of x with weight i of the group;
// `begin` [weights + 1] is memory of the context's device, and no weight has more than `most_rows`
// rows. A row has the bits that `linear` gives it.
void linear_group(Context& ctx, Op op, const WeightGroup& w, const int32_t* begin,
                  int64_t most_rows, const Mat& x, const Mat& y, Epilogue epilogue);

}  // namespace turbomind
