// What blocks that run at once see of device memory. A block's stores reach other blocks at its
// device_fence, or at the end of the kernel; it sees what theirs have replaced until its own fence.
// That is the latest that CUDA's memory model allows. Atomic operations act on memory itself.
// Internal to the emulator.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace turbomind::emulator {

// Bytes of one access, at most 16 and aligned to their number, so within a unit of 16.
struct AccessBytes {
  uint8_t* at;
  uint8_t count;
  std::array<uint8_t, 16> bytes;
};

// A block's own part.
struct BlockView {
  struct Store {
    AccessBytes data;
    int warp, phase;  // barriers of the block before it
  };
  std::unordered_map<uintptr_t, std::vector<Store>> stores;  // not yet in memory, by unit
  std::unordered_map<uintptr_t, uint64_t> seen;              // times of own atomic operations
  uint64_t fenced = 0;                                       // time of the last fence
};

class DeviceMemory {
 public:
  void load(const BlockView& view, void* to, const void* p, size_t bytes) const;
  static void store(BlockView& view, int warp, int phase, void* p, const void* from, size_t bytes);
  // Stores of the thread's warp, and of all warps before the last barrier, reach memory.
  void fence(BlockView& view, int warp, int phase);
  // Adds `value` to the 4 or 8 bytes at p. Returns the sum before.
  uint64_t add(BlockView& view, void* p, uint64_t value, size_t bytes);
  // The rest of a block's stores, when the kernel has ended.
  static void finish(const BlockView& view);

 private:
  struct Change {
    uint64_t time;
    AccessBytes before;
  };

  void write(const AccessBytes& data);

  std::unordered_map<uintptr_t, std::vector<Change>> changes_;  // by unit, in order
  uint64_t now_ = 0;
};

}  // namespace turbomind::emulator
