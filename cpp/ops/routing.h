// Routing of tokens to the experts of a layer: which experts a token takes and with what weights,
// the order of rows in which each expert finds its own side by side, and the weighted sum of the
// experts' outputs.
#pragma once

#include "core/context.h"
#include "core/tensor.h"

namespace turbomind {

constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;

// The weights of a token's experts are a softmax of logits: over all experts, or, where they are
// renormalised to a sum of 1, over those that the token takes. Each expert may have a factor
// beside.
struct RouteShape {
  int experts = 0;
  int top_k = 0;
  bool renormalize = false;
  const float* scale = nullptr;  // [experts] factors of the weights, memory of the device, or null
};

// Choice c is of token c / top_k; the choices of a token ascend by expert. Rows are the choices in
// the order of their experts, those of one expert by token. Arrays are memory of the context's
// device.
struct Routing {
  int64_t tokens = 0;
  int top_k = 0;
  int experts = 0;
  int32_t* expert = nullptr;  // [tokens * top_k] of a choice
  float* weight = nullptr;    // [tokens * top_k] of a choice
  int32_t* row = nullptr;     // [tokens * top_k] of a choice
  int32_t* token = nullptr;   // [tokens * top_k] of a row
  int32_t* begin = nullptr;   // [experts + 1] first row of an expert, and the number of rows

  int64_t rows() const { return tokens * top_k; }
};

// Returns the elements of 4 bytes that the arrays of a routing have together.
constexpr int64_t routing_elements(int64_t tokens, const RouteShape& shape) {
  return 4 * tokens * shape.top_k + shape.experts + 1;
}
// Returns a routing whose arrays lie in memory of that many elements.
Routing routing_in(void* memory, int64_t tokens, const RouteShape& shape);

// Fills the arrays from logits [tokens, experts], float32. A token takes the experts with the
// highest logits; of equal ones those with the lower numbers. A NaN among the logits makes the
// weights NaN. Throws Error(internal) for shapes and types that disagree.
void route(Context& ctx, const RouteShape& shape, const Mat& logits, const Routing& routing);

// What each token gets beside its experts: out [tokens, n], scaled by the sigmoid of gate
// [tokens, 1], both float32. Without data there is none, or no gate.
struct BesideExperts {
  Mat out, gate;
};

// y = the sum of a token's outputs times their weights, or y += it: it starts from zero, adds by
// ascending expert, and then what is beside them. outputs [rows, n] and y [tokens, n] are float32.
void combine(Context& ctx, const Routing& routing, const Mat& outputs, const BesideExperts& beside,
             bool add, const Mat& y);

}  // namespace turbomind
