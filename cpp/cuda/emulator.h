// Runs kernels on the host: what cuda/kernel_emulated.h is made of.
//
// Each CUDA thread is a fiber; blocks run one after another from any of them on, upwards or
// downwards, the warps of a block one after another from barrier to barrier in shuffled order, the
// lanes of a warp one after another from one warp-level operation to the next, upwards or
// downwards. So a thread that relies on a missing
// __syncthreads or __syncwarp meets stale data. Shared memory has exactly the size asked for and is
// filled with NaN before each block. Bytes of copy_async16 arrive at the wait; until then their
// place holds NaN. Reported, as Error(internal) naming kernel, block and thread: a barrier or
// warp-level operation that not all threads reach, a misaligned or null access, shared memory used
// as device memory and the reverse, a mask that is not full, an access before wait_for_previous, a
// thread that returns without it, a load_constant of what a kernel wrote since the last copy.
//
// One kernel runs at a time, whichever host threads launch them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/types.h"

namespace turbomind::emulator {

struct Dim3 {
  unsigned x, y, z;
  constexpr Dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// What all launches of a kernel did since reset_counters.
struct LaunchCounters {
  int64_t launches = 0;
  int64_t blocks = 0;
  int64_t bytes_loaded = 0;  // of device memory, copy_async16 included
  int64_t bytes_stored = 0;
  int64_t mmas = 0;  // of a warp
};

// `kernel` as launched ("scale<Bf16>"), or without arguments: the sum over all of them.
LaunchCounters counters(const std::string& kernel);
void reset_counters();

// The order of warps and lanes follows from the seed (default 1) and the launches since.
void set_schedule_seed(uint64_t seed);

constexpr size_t kMaxSharedBytes = 227 << 10;  // of a block, as on Hopper
constexpr size_t kMaxParamBytes = 4096;

// One launch, its parameters frozen.
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

// Throws what the launch itself does wrong; runs it now on the default stream, else when the
// stream's turn comes (cuda/emulated_stream.h).
void submit(StreamHandle stream, Launch launch);
void run(const Launch& launch);

// From here on nothing counts as written by the kernels of a step: a copy has waited for them.
void end_of_step();

// ---- For kernel_emulated.h: what the running thread sees and does.

struct Block {
  Dim3 index, grid, threads;
  uint8_t* shared = nullptr;
  size_t shared_bytes = 0;
  int64_t bytes_loaded = 0, bytes_stored = 0, mmas = 0;
};

struct Lane {
  Dim3 thread_index;
  Block* block = nullptr;
  bool waited = false;  // for the kernels before
};

// Of the one kernel that runs. Not one per host thread: kernels read it at every access, and a
// library that is loaded late gets thread-local variables only through a call.
extern Lane* current_lane;

void sync_block();
void sync_warp();
void shuffle(const void* value, void* result, size_t bytes, int source_lane);
uint32_t ballot(bool vote);
void mma16816(bool bf16, float* c, const uint32_t* a, const uint32_t* b);
void ldmatrix(uint32_t* registers, const void* row, int count, bool transposed);
void copy_async16(void* shared, const void* bytes);
void copy_async_commit();
void copy_async_wait(int groups);

// Ends the launch with an error.
[[noreturn]] void fail(const std::string& what);
[[noreturn]] void fail_access(const char* what, const void* p, size_t bytes);
[[noreturn]] void fail_early(const char* what);
void note_store(const void* p);
void check_constant(const void* p);

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

}  // namespace turbomind::emulator
