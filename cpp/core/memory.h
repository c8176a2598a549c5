// Large zero-initialised host buffers in 2 MiB pages, and the allocators of KV pages in host
// memory. Device memory is in cuda/gpu.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace turbomind {

// Anonymous memory, 2 MiB aligned, `madvise(MADV_HUGEPAGE)`; reads as zero until written.
// With 4 KiB pages a streaming read of weights loses about a quarter of the bandwidth.
class HugeBuffer {
 public:
  HugeBuffer() = default;
  explicit HugeBuffer(size_t bytes);  // throws Error(internal) if the system is out of memory
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& o) noexcept { swap(o); }
  HugeBuffer& operator=(HugeBuffer&& o) noexcept {
    swap(o);
    return *this;
  }
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  // Makes the system allocate the first `bytes` now, not at their first use. Any thread may call it
  // while others use the memory. It does nothing before Linux 5.14.
  void populate(size_t bytes) const;

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  void swap(HugeBuffer& o) {
    std::swap(base_, o.base_);
    std::swap(mapped_, o.mapped_);
    std::swap(data_, o.data_);
    std::swap(size_, o.size_);
  }
  void* base_ = nullptr;
  size_t mapped_ = 0;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

// A block of host memory. Its last owner frees it, and then the allocator that it came from.
using HostBlock = std::shared_ptr<uint8_t>;

// An allocator of host memory for KV pages: the memory that the device copies fastest (pinned for a
// GPU).
struct HostMemory {
  std::function<HostBlock(size_t bytes)> allocate;  // throws Error(internal) if memory is short
  // Size in bytes of the pieces to allocate as they are needed; 0: one piece of any size, which the
  // system backs as it is used.
  size_t slab_bytes = 0;
  // Bytes of such pieces to allocate in advance: at the start, and later in idle time.
  size_t reserved_bytes = 0;
};
HostMemory plain_memory();  // blocks of it are aligned to 4 KiB

}  // namespace turbomind
