// The driver of products on the CPU: x in the type that a kernel reads, the split into pieces, and
// the parallel loop over them. Serves every kernel of linear/linear_kernels.h.
#pragma once

#include <span>
#include <vector>

#include "linear/linear_kernels.h"
#include "linear/weight_format.h"

namespace turbomind {

// y = epilogue(x W^T) by a kernel. The format fills what `job` needs of its weights: panel_bytes,
// k_block_bytes, k_blocks and, for XType::int8, codes and columns. x.rows > 0.
struct Product {
  const LinearKernel* kernel = nullptr;
  LinearJob job;
  const LinearWeight* w = nullptr;
  Mat x, y;
  LinearArgs args;
};

// Returns the products of WeightFormat::matmul_group whose weights have rows, without kernels and
// jobs. `begin` is host memory. They are valid until the thread's next call.
std::vector<Product>& group_products(const WeightGroup& w, const int32_t* begin, const Mat& x,
                                     const Mat& y, Epilogue epilogue);
// Computes products that do not depend on each other, of kernels with one XType, in one parallel
// region.
void run_products(Context& ctx, std::span<const Product> products);

}  // namespace turbomind
