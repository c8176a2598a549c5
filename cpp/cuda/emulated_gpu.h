// Controls and counters of emulated GPUs, for tests.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turbomind::emulator {

// Sets the device memory of GPUs that are opened later (default 1 GiB).
void set_device_bytes(size_t bytes);

// Makes every capture of a graph fail after all work was submitted, as if memory were short, until
// it is called with false.
void set_capture_fails(bool fails);

// Makes every call that can fail return the error of a faulty kernel, on every GPU, until it is
// called with false.
void set_device_fails(bool fails);

// Returns the number of graphs that all emulated GPUs have captured.
int64_t captures();

// Returns the number of allocations of device and pinned memory by all emulated GPUs.
int64_t allocations();

}  // namespace turbomind::emulator
