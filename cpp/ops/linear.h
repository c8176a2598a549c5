// y = x W^T with bias, addend and epilogue.
#pragma once

#include "linear/weight_format.h"

namespace turbomind {

// x [m, k]; y [m, n], or [m, n/2] for Epilogue::silu_mul. Checks shapes and dtypes (Error(internal)
// names what differs), then calls the weight's format. m == 0 is allowed and does nothing.
void linear(Context& ctx, Op op, const LinearWeight& w, const Mat& x, const Mat& y,
            const LinearArgs& args = {});

}  // namespace turbomind
