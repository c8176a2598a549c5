// The memory of all emulated GPUs, and which of them may use it. Internal to the emulator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace turbomind::emulator {

// Guarded by the lock of Streams.
class MemoryMap {
 public:
  struct Allocation {
    int device;
    size_t bytes;
    bool pinned;
  };

  static MemoryMap& get();

  void add(const void* p, const Allocation& allocation);
  // Returns the allocation that began at p; it must exist.
  Allocation remove(const void* p);
  // Returns whether the range is in memory of any GPU, pinned memory included; throws if it is
  // partly outside.
  bool has_range(const char* call, const void* p, size_t bytes) const;

  // Returns the allocation that has the byte at p; null: none has it.
  const Allocation* allocation_of(const void* p) const;

  // Whether GPUs can access each other's memory (emulated_gpu.h).
  void set_peer_access(bool on) {
    can_access_ = on;
    enabled_.clear();
    last_device_ = -1;
  }
  bool can_access_peers() const { return can_access_; }
  void enable_access(int device, int owner) { enabled_.insert({device, owner}); }
  // Whether several GPUs have memory.
  bool has_peers() const { return devices_.size() > 1; }
  // Returns the owner of p where it is device memory that kernels of `device` may not use, else -1.
  int forbidden_owner(int device, const void* p) const;

 private:
  // The allocation that has the byte at p, or end().
  std::map<const uint8_t*, Allocation>::const_iterator find(const void* p) const;

  std::map<const uint8_t*, Allocation> allocations_;
  std::set<std::pair<int, int>> enabled_;  // device, owner
  bool can_access_ = true;
  std::map<int, int> devices_;  // allocations of device memory by device
  // Where forbidden_owner() last found memory that may be used.
  mutable int last_device_ = -1;
  mutable const uint8_t *last_begin_ = nullptr, *last_end_ = nullptr;
};

}  // namespace turbomind::emulator
