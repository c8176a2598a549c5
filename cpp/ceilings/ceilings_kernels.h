// The inner loops of the ceilings, compiled once per ISA.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turbomind {

struct CeilingKernels {
  // Sum of `bytes` bytes (a multiple of 4096) read as float32; returned so that the loop stays.
  float (*read)(const uint8_t* p, size_t bytes) = nullptr;
  // `rounds` rounds of register-only products; returns the FLOPs of one round.
  double (*tiles)(int64_t rounds) = nullptr;
  // The same for products of bytes with int32 sums.
  double (*int8)(int64_t rounds) = nullptr;
};

}  // namespace turbomind
