// Runs kernels on the host; cuda/kernel_emulated.h is built on it. It checks kernels, at a speed
// thousands of times below a GPU's.
//
// Each CUDA thread is a fiber; blocks run one after another, upwards or downwards from a random
// one. Warps of a block run one after another from barrier to barrier in shuffled order, lanes of a
// warp one after another from one warp-level operation to the next, upwards or downwards. So a
// kernel without a __syncthreads or __syncwarp that it needs reads stale data. Shared memory has
// exactly the size of the launch and is filled with NaN before each block. Bytes of copy_async16
// arrive at the wait; until then their place holds NaN.
//
// The emulator reports, as Error(internal) with kernel, block and thread: a barrier or
// warp-level operation that not all threads reach, a misaligned or null access, shared memory used
// as device memory and the reverse, a mask that is not full, an access before wait_for_previous, a
// thread that returns without it, a load_constant of what a kernel wrote since its stream's last
// copy.
//
// A kernel that waits for another stream (cuda/device_wait.h) is abandoned where it stands and run
// again later, so it waits before it stores anything.
//
// With run_blocks_at_once() blocks run interleaved, and see each other's stores as late as CUDA
// allows: kernels whose blocks work together are tested so.
//
// One kernel runs at a time, also if several host threads launch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "cuda/types.h"

namespace turbomind::emulator {

struct Dim3 {
  unsigned x, y, z;
  constexpr Dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// Sums over all launches of a kernel since reset_counters.
struct LaunchCounters {
  int64_t launches = 0;
  int64_t blocks = 0;
  int64_t bytes_loaded = 0;  // of device memory, copy_async16 included
  int64_t bytes_stored = 0;
  int64_t mmas = 0;  // counted per warp
};

// Returns the counters of a kernel as launched ("scale<Bf16>"), or, without template arguments, the
// sum over all of its instances.
LaunchCounters counters(const std::string& kernel);
void reset_counters();

// Sets the seed (default 1) that, with the number of launches since, fixes the order of warps and
// lanes.
void set_schedule_seed(uint64_t seed);

// Sets how many blocks of a launch run at once. They take turns at barriers, atomic operations and
// fences. A block's stores reach the others when it has called device_fence (cuda/last_block.h), or
// at the end of the kernel, and it sees theirs after its own. 0 (the default): blocks run one after
// another, and stores are seen at once.
void run_blocks_at_once(int blocks);

constexpr size_t kMaxSharedBytes = 227 << 10;  // per block, as on Hopper
constexpr size_t kMaxParamBytes = 4096;

// One launch with a copy of its parameters.
struct Launch {
  const char* kernel;
  Dim3 grid;
  int threads;
  size_t shared_bytes;
  void (*entry)(const void* params);
  std::string params;

  void set_params(const void* p, size_t bytes) {
    params.assign(static_cast<const char*>(p), bytes);
  }
};

// Runs a launch now on the default stream (null), else queues it (cuda/emulated_stream.h). Throws
// Error(internal) for a launch that a device would refuse.
void submit(StreamHandle stream, Launch launch);
void run(const Launch& launch);

// Ends a step of running_stream() for check_constant(): a copy in the stream has waited for the
// step's kernels, so constants may be what they wrote. A copy in another stream waits for none.
void end_of_step();
// The same for all streams: memory was freed, which waits for the whole device.
void end_of_all_steps();

// ---- For kernel_emulated.h: state and operations of the running thread.

struct Block {
  Dim3 index, grid, threads;
  uint8_t* shared = nullptr;
  size_t shared_bytes = 0;
  int64_t bytes_loaded = 0, bytes_stored = 0, mmas = 0;
};

struct Lane {
  Dim3 thread_index;
  Block* block = nullptr;
  bool waited = false;  // wait_for_previous() was called
};

// The running lane of the one kernel that runs. It is not thread-local: kernels read it at every
// access, and thread-local variables of a library loaded late cost a call each.
extern Lane* current_lane;

// What blocks that run at once see of device memory; null: blocks run one after another.
class DeviceMemory;
extern DeviceMemory* device_memory;

void sync_block();
void sync_warp();
void shuffle(const void* value, void* result, size_t bytes, int source_lane);
uint32_t ballot(bool vote);
void mma16816(bool bf16, float* c, const uint32_t* a, const uint32_t* b);
void ldmatrix(uint32_t* registers, const void* row, int count, bool transposed);
void device_fence();
uint64_t atomic_add(void* p, uint64_t value, size_t bytes);
void copy_async16(void* shared, const void* bytes);
void copy_async_commit();
void copy_async_wait(int groups);

// Ends the launch with an error.
[[noreturn]] void fail(const std::string& what);
[[noreturn]] void fail_access(const char* what, const void* p, size_t bytes);
[[noreturn]] void fail_early(const char* what);
void load_shared_by_blocks(void* to, const void* p, size_t bytes);
void store_shared_by_blocks(void* p, const void* from, size_t bytes);
void note_store(const void* p);
void check_constant(const void* p);
void check_owner(const char* what, const void* p, size_t bytes);
// Waits until *counter has reached `count`. Returns false where *stop is not 0 or time runs out.
bool wait_for_count(const uint32_t* counter, uint32_t count, const uint32_t* stop);
void post_count(uint32_t* counter, uint32_t count);
// Whether the GPU of the running kernel may lack access to memory; see MemoryMap.
extern bool owners_matter;
// Whether a fault is set (emulated_gpu.h, set_peer_fault).
extern bool peers_fail;
void spoil_peer_load(void* loaded, const void* p);

inline void check_mask(unsigned mask) {
  if (mask != 0xffffffffu) fail("a warp-level operation has a mask that is not full");
}
inline bool is_shared(const void* p) {
  const Block& b = *current_lane->block;
  return static_cast<size_t>(static_cast<const uint8_t*>(p) - b.shared) < b.shared_bytes;
}
inline void check_device_access(const char* what, const void* p, size_t bytes) {
  if (p == nullptr || reinterpret_cast<uintptr_t>(p) % bytes != 0 || is_shared(p))
    fail_access(what, p, bytes);
  if (owners_matter) check_owner(what, p, bytes);
}
inline void check_waited(const char* what) {
  if (!current_lane->waited) fail_early(what);
}
inline void count_load(const void* p, size_t bytes) {
  check_waited("load");
  check_device_access("load", p, bytes);
  current_lane->block->bytes_loaded += static_cast<int64_t>(bytes);
}
inline void count_constant_load(const void* p, size_t bytes) {
  check_device_access("load_constant", p, bytes);
  check_constant(p);
  current_lane->block->bytes_loaded += static_cast<int64_t>(bytes);
}
inline void count_store(const void* p, size_t bytes) {
  check_waited("store");
  check_device_access("store", p, bytes);
  note_store(p);
  current_lane->block->bytes_stored += static_cast<int64_t>(bytes);
}

inline void load_device(void* to, const void* p, size_t bytes) {
  if (device_memory)
    load_shared_by_blocks(to, p, bytes);
  else
    std::memcpy(to, p, bytes);
  if (peers_fail) spoil_peer_load(to, p);
}
inline void store_device(void* p, const void* from, size_t bytes) {
  if (device_memory) return store_shared_by_blocks(p, from, bytes);
  std::memcpy(p, from, bytes);
}

}  // namespace turbomind::emulator
