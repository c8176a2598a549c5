// Rows of the embedding table as float32.
#pragma once

#include "ops/linear.h"

namespace turbomind {

// y [rows, k] float32 = table rows ids[0..rows) * scale. ids are in range (the engine checked).
void embedding(Context& ctx, const LinearWeight& table, const int32_t* ids, float scale,
               const Mat& y);

}  // namespace turbomind
