// The product of a gate and a row, apart from the matrix products that linear/epilogue.h fuses it
// with.
#pragma once

#include "core/context.h"
#include "core/tensor.h"
#include "linear/epilogue.h"

namespace turbomind {

// y = activation(gate) * up, element by element, with the activation of a gated epilogue: gate and
// up [rows, cols] float32, y float32, bfloat16 or, on a GPU, float16; padded columns of y become
// zero. Throws Error(internal) for other types, shapes that differ, and an epilogue without a gate.
void multiply_gate(Context& ctx, Epilogue epilogue, const Mat& gate, const Mat& up, const Mat& y);

}  // namespace turbomind
