// y = x W^T with bias, addend and epilogue. Formats and kernels are in cpp/linear.
#pragma once

#include "linear/weight_format.h"

namespace turbomind {

// x [m, k] float32 or 16-bit; y [m, n], or [m, n/2] for Epilogue::silu_mul. `op` is what the
// profile counts it as. Checks shapes and types (Error(internal) names what differs), then calls
// the weight's format. m == 0 is allowed and does nothing.
void linear(Context& ctx, Op op, const LinearWeight& w, const Mat& x, const Mat& y,
            const LinearArgs& args = {});

}  // namespace turbomind
