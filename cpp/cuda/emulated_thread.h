// A CUDA thread of the emulator: a fiber, its warp, and the operation it waits for. Internal to the
// emulator.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/emulator.h"
#include "cuda/fiber.h"

namespace turbomind::emulator {

constexpr int kWarp = 32;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 128 << 10;
#endif

// The operation at which a thread waits for its warp.
enum class Point : uint8_t { syncthreads, returned, syncwarp, shuffle, vote, mma, ldmatrix };

// Operands of one lane in a warp-level operation. Pointers lead into the stacks of waiting lanes.
struct Operands {
  const void* in = nullptr;
  const void* in2 = nullptr;
  void* out = nullptr;
  size_t bytes = 0;
  int number = 0;
  bool flag = false;
};

struct Copy {
  uint8_t* to;
  std::array<uint8_t, 16> bytes;
};

struct Warp;
class BlockRun;

// Error of a kernel; thrown and caught on the stack of its thread.
struct Failure {
  std::string what;
  bool not_ready = false;  // none: the launch waits for another stream
};

struct Thread : Lane {
  explicit Thread(int index) : fiber(kStackBytes, index), place(index % kWarp) {}
  Fiber fiber;
  const int place;  // lane in the warp
  Warp* warp = nullptr;
  BlockRun* run = nullptr;
  Point point = Point::returned;
  Operands operands;
  std::vector<Copy> copies;    // pending copies of copy_async16, in order
  std::vector<size_t> groups;  // number of copies in each committed group
  size_t uncommitted = 0;
};

struct Warp {
  std::array<Thread*, kWarp> threads;
  int arrived = 0;
  int direction = 1;  // in which the lanes run: 1 or -1

  Thread& first() const { return *threads[direction > 0 ? 0 : kWarp - 1]; }
};

inline Thread& running() {
  return *static_cast<Thread*>(current_lane);
}

}  // namespace turbomind::emulator
