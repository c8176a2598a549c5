// Kinds of steps of a GPU.
#pragma once

#include <compare>
#include <cstdint>

namespace turbomind {

// Steps of equal kinds are computed by the same kernels. Numbers are rounded up.
struct LaunchKind {
  int64_t tokens = 0, samples = 0;
  int rows = 0;                         // sequences
  int pages = 0;                        // of the longest one
  bool decode = false, chunks = false;  // sequences of one token, and of more, occur
  bool follows = false;                 // takes tokens of the step before
  bool profiled = false;
  auto operator<=>(const LaunchKind&) const = default;
};

}  // namespace turbomind
