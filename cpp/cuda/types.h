// Types of device code and host code: 16-bit elements and the handle of a stream.
#pragma once

#include <cstdint>

namespace turbomind {

// Bits of one element in device memory. Conversions for kernels are in cuda/kernel.h, those for the
// host in core/dtype.h.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// A stream of a Gpu, as launch() takes it. Null is the device's default stream; the emulator
// runs its launches at once.
struct OpaqueStream;
using StreamHandle = OpaqueStream*;

}  // namespace turbomind
