// Kernels that measure the best rates of a device's memory: streams that only read, and streams
// that copy.
#pragma once

#include <cstdint>

#include "cuda/types.h"

namespace turbomind {

constexpr int kStreamThreads = 256;
constexpr int kStreamVectors = 8;  // of 16 bytes, in flight at once per thread
constexpr int64_t kStreamTile = int64_t{16} * kStreamThreads * kStreamVectors;  // bytes of a block

// Pointers are device memory, aligned to 16.
struct MemoryStream {
  const void* from = nullptr;
  // copy: `bytes`. read: 16 bytes for each of `blocks` * kStreamThreads threads, which get the
  // exclusive or of what the thread has read.
  void* to = nullptr;
  int64_t bytes = 0;  // a multiple of kStreamTile
  int blocks = 0;
};

struct CeilingsCuda {
  void (*read)(StreamHandle stream, const MemoryStream& memory);
  void (*copy)(StreamHandle stream, const MemoryStream& memory);
};

}  // namespace turbomind
