// Allocations that fail for chosen threads, in a driver that calls them as
// tests/engine/wrapped_allocations.h says.
#pragma once

#include <cstdint>

namespace turbomind::fuzz {

enum class Allocation : uint8_t { object, mapping };  // by operator new, by mmap()

// Decides whether an allocation fails, on the threads whose memory_watch it is.
class MemoryWatch {
 public:
  virtual bool fails(Allocation allocation) = 0;

 protected:
  ~MemoryWatch() = default;
};
inline thread_local MemoryWatch* memory_watch = nullptr;

inline bool fails(Allocation allocation) {
  return memory_watch != nullptr && memory_watch->fails(allocation);
}

}  // namespace turbomind::fuzz
