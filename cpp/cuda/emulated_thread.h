// A CUDA thread as the emulator has it: a fiber, its warp, and what it waits for. Of the emulator's
// own files alone.
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

// Where a thread waits for its warp.
enum class Point : uint8_t { syncthreads, returned, syncwarp, shuffle, vote, mma, ldmatrix };

// What a lane brings to a warp-level operation. Pointers are into the stacks of waiting lanes.
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
class Machine;

// What a kernel did wrong; travels no further than its thread's own stack.
struct Failure {
  std::string what;
};

struct Thread : Lane {
  explicit Thread(int index) : fiber(kStackBytes, index), place(index % kWarp) {}
  Fiber fiber;
  const int place;  // in the warp
  Warp* warp = nullptr;
  Machine* machine = nullptr;
  Point point = Point::returned;
  Operands operands;
  std::vector<Copy> copies;    // of copy_async16, in order; not arrived
  std::vector<size_t> groups;  // how many of them each committed group has
  size_t uncommitted = 0;
};

struct Warp {
  std::array<Thread*, kWarp> threads;
  int arrived = 0;
  int direction = 1;  // in which the lanes run

  Thread& first() const { return *threads[direction > 0 ? 0 : kWarp - 1]; }
};

inline Thread& running() {
  return *static_cast<Thread*>(current_lane);
}

}  // namespace turbomind::emulator
