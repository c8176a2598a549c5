// The last operation of a product with a weight.
#pragma once

#include <cstdint>

namespace turbomind {

enum class Epilogue : uint8_t {
  store,     // y  = x W^T + bias (+ addend)
  add,       // y += x W^T + bias (+ addend); y is float32
  silu_mul,  // weight rows alternate in blocks of 16: gate, up. y[n/2] = silu(gate) * up
};

}  // namespace turbomind
