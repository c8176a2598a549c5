// The element types that K and V are stored in: the one table that the page codec, the ops, the
// builder and the GPU's page copies look up. docs/contributing/add-a-kv-type.md: how to add
// one. Names and sizes are in core/dtype.h; Python's options list the names
// (turbomind/loading/loader.py).
#pragma once

#include "core/dtype_set.h"

namespace turbomind {

// Types that the CPU's kernels and page codec take, and types that a GPU's take.
constexpr DTypes kHostKvTypes{DType::f32, DType::f16, DType::bf16};
constexpr DTypes kGpuKvTypes{DType::f16, DType::bf16};

// Returns how many elements of one head or token lie side by side in a tiled block: as many as fill
// a word of 4 bytes, the unit of the page codec.
constexpr int kv_pair(DType t) {
  return static_cast<int>(4 / dtype_bytes(t));
}

}  // namespace turbomind
