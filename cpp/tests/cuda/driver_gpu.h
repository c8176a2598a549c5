// The GPU and the seed of a test driver: the emulator, or with "--gpu" the first real GPU; "--seed
// N" makes other inputs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/emulator.h"
#include "cuda/gpu.h"

namespace turbomind {

inline Gpu* real = nullptr;     // null: the emulator, whose device memory is host memory
inline uint32_t test_seed = 0;  // added to the seeds of inputs

inline GpuKind kind() {
  return real != nullptr ? GpuKind::cuda : GpuKind::emulated;
}
inline size_t shared_per_block() {
  return real != nullptr ? real->info().shared_bytes : emulator::kMaxSharedBytes;
}

// Waits for all launches; the emulator runs a launch at once.
inline void finish_kernels() {
  if (real != nullptr) real->synchronize(StreamHandle{});
}

// Opens the first real GPU and sets `real`, or ends the program.
inline std::unique_ptr<Gpu> open_real() {
  std::string why;
  if (gpu_count(GpuKind::cuda, &why) == 0) {
    std::fprintf(stderr, "%s\n", why.c_str());
    std::exit(2);
  }
  std::unique_ptr<Gpu> gpu = open_gpu(GpuKind::cuda, 0);
  gpu->make_current();
  real = gpu.get();
  return gpu;
}

// Reads a driver's arguments: takes "--gpu" and "--seed N" and returns the others. The GPU stays
// open until the process ends.
inline std::vector<std::string> read_arguments(int argc, char** argv) {
  std::vector<std::string> others;
  bool gpu = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--gpu") == 0) {
      gpu = true;
    } else if (std::strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
      test_seed = 1000003u * static_cast<uint32_t>(std::strtoul(argv[++i], nullptr, 10));
    } else {
      others.push_back(argv[i]);
    }
  }
  if (gpu) open_real().release();
  return others;
}

// Splits a driver's other arguments into folders of libraries, which have a '/', and names of
// cases.
inline std::pair<std::vector<std::string>, std::vector<std::string>> split_folders(
    const std::vector<std::string>& arguments) {
  std::pair<std::vector<std::string>, std::vector<std::string>> split;
  for (const std::string& argument : arguments)
    (argument.find('/') != std::string::npos ? split.first : split.second).push_back(argument);
  return split;
}

// Free blocks of all element types, by size; they are never released.
inline std::map<size_t, std::vector<void*>>& shared_free_blocks() {
  static auto* const blocks = new std::map<size_t, std::vector<void*>>;
  return *blocks;
}

// Memory that host and kernels share at one address: host memory in emulation, pinned memory with a
// real GPU. It is slow to compute on, and simple. Freed blocks are used again.
template <typename T>
struct SharedAllocator {
  using value_type = T;
  SharedAllocator() = default;
  template <typename U>
  SharedAllocator(const SharedAllocator<U>&) {}

  T* allocate(size_t count) {
    if (real == nullptr) return std::allocator<T>().allocate(count);
    std::vector<void*>& blocks = shared_free_blocks()[rounded(count)];
    if (blocks.empty()) return static_cast<T*>(real->allocate_pinned(rounded(count)));
    void* const block = blocks.back();
    blocks.pop_back();
    return static_cast<T*>(block);
  }
  void deallocate(T* p, size_t count) {
    if (real == nullptr) return std::allocator<T>().deallocate(p, count);
    shared_free_blocks()[rounded(count)].push_back(p);
  }
  template <typename U>
  bool operator==(const SharedAllocator<U>&) const {
    return true;
  }

 private:
  static size_t rounded(size_t count) { return (count * sizeof(T) / 4096 + 1) * 4096; }
};

// A vector that kernels read and write.
template <typename T>
using SharedVector = std::vector<T, SharedAllocator<T>>;

}  // namespace turbomind
