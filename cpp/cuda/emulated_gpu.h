// Controls and counters of emulated GPUs, for tests.
#pragma once

#include <cstddef>
#include <cstdint>

namespace turbomind::emulator {

// Sets the device memory of GPUs that are opened later (default 1 GiB), of all or of one.
void set_device_bytes(size_t bytes);
void set_device_bytes(int device, size_t bytes);

// Sets the number of GPUs (default 4).
void set_device_count(int count);

// Sets whether GPUs can be given access to each other's memory (the default), and takes all access
// back. Kernels that use memory without access fail.
void set_peer_access(bool on);

// What is wrong with the access of one GPU to the memory of another one: loads of kernels return
// other values, or waits never see a count that was posted there.
enum class PeerFault { none, wrong, late };
void set_peer_fault(PeerFault fault, int reader = 0, int owner = 0);

// With true, each kernel is loaded at its first launch from now on, on each GPU. A launch that
// loads one, or a capture, fails where work of any GPU waits for work that no host has submitted: a
// driver may wait for all work before it, and keep other threads from launching. The default is
// false.
void set_lazy_loading(bool on);

// Sets how long a host waits for a stream that waits for work that no other host thread submits
// (default 10 s). Then the time of kernels that wait for another stream runs out, and a wait for an
// event throws.
void set_wait_limit(double seconds);

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
