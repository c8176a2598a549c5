// What tests may set of emulated GPUs.
#pragma once

#include <cstddef>

namespace turbomind::emulator {

// Device memory of GPUs opened from now on (default 1 GiB).
void set_device_bytes(size_t bytes);

}  // namespace turbomind::emulator
