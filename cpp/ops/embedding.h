// Rows of the embedding table as float32.
#pragma once

#include "ops/linear.h"

namespace turbomind {

// y [rows, k] float32 = table rows ids[0..rows) * scale; padded columns become zero. `ids` is
// memory of the context's device, all in range (the engine checks them). On a GPU the table may be
// a part of one, from row `first` on; ids outside it give rows of zeros. Throws Error(internal) for
// another type or width of y.
void embedding(Context& ctx, const LinearWeight& table, const int32_t* ids, float scale,
               const Mat& y, int64_t first = 0);

}  // namespace turbomind
