// What tests may set of emulated GPUs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turbomind::emulator {

// Device memory of GPUs opened from now on (default 1 GiB).
void set_device_bytes(size_t bytes);

// Whether capturing a graph fails from now on, after everything was submitted, as it does where
// memory ends.
void set_capture_fails(bool fails);

// From now on every GPU answers as one whose kernel has gone wrong, to all that can fail, until
// `fails` is false again.
void set_device_fails(bool fails);

// Graphs captured by all emulated GPUs up to now.
int64_t captures();

// Allocations of device and of pinned memory by all emulated GPUs up to now.
int64_t allocations();

}  // namespace turbomind::emulator
