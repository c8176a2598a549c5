#include "ops/rope.h"

#include <algorithm>
#include <cmath>

namespace turbomind {

// Not profiled apart: it runs once per step, not once per layer.
void rope_angles(Context& ctx, const RopeTable& table, const int32_t* positions, int64_t rows,
                 float* cos, float* sin) {
  const int64_t n = static_cast<int64_t>(table.inv_freq.size());
  const int64_t grain = std::max<int64_t>(1, 1024 / std::max<int64_t>(1, n));
  ctx.pool.parallel_for(rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t i = 0; i < n; ++i) {
        const float angle = static_cast<float>(positions[r]) * table.inv_freq[i];
        const double a = angle;
        cos[r * n + i] = static_cast<float>(std::cos(a)) * table.attention_factor;
        sin[r * n + i] = static_cast<float>(std::sin(a)) * table.attention_factor;
      }
    }
  });
}

}  // namespace turbomind
