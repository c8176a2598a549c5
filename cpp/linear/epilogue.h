// The last operation of a product with a weight.
#pragma once

#include <cstdint>

namespace turbomind {

enum class Epilogue : uint8_t {
  store,     // y  = x W^T + bias (+ addend)
  add,       // y += x W^T + bias (+ addend); y is float32
  silu_mul,  // weight rows alternate in blocks of 16: gate, up. y[n/2] = silu(gate) * up
  gelu_mul,  // the same with the tanh approximation of GELU (Hendrycks and Gimpel, 2016)
  // The SwiGLU of gpt-oss: gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up from
  // -7 to 7.
  swiglu_mul,
};

// Whether the weight has gates and ups, and y half as many columns as the weight has rows.
constexpr bool is_gated(Epilogue epilogue) {
  return epilogue == Epilogue::silu_mul || epilogue == Epilogue::gelu_mul ||
         epilogue == Epilogue::swiglu_mul;
}

constexpr float kSwigluAlpha = 1.702f;
constexpr float kSwigluLimit = 7;

}  // namespace turbomind
