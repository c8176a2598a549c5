// Angles of rotary position embeddings (Su et al., "RoFormer", 2021). ops/rope_kv.h applies them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/context.h"

namespace turbomind {

// A table is its inverse frequencies; an angle depends on the position alone. Any scaling (linear,
// llama3, yarn, NTK at a fixed length) is already in `inv_freq` and `attention_factor`.
struct RopeTable {
  std::vector<float> inv_freq;    // [rotated width / 2]
  float attention_factor = 1.0f;  // multiplies cos and sin (yarn)
  bool interleaved = false;       // pairs (2i, 2i+1) instead of (i, i + width/2)
};

// cos, sin [rows, inv_freq.size()] float32 of float32(position * inv_freq): the product is rounded
// to float32 first, as the reference implementations do, then taken in double.
void rope_angles(Context& ctx, const RopeTable& table, const int32_t* positions, int64_t rows,
                 float* cos, float* sin);

}  // namespace turbomind
