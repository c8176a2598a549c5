// Large zero-initialised buffers in 2 MiB pages.
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
  explicit HugeBuffer(size_t bytes);  // throws Error(internal) when the system has no memory
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& o) noexcept { swap(o); }
  HugeBuffer& operator=(HugeBuffer&& o) noexcept {
    swap(o);
    return *this;
  }
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  // Has the memory of the first `bytes` given out now, not at its first use. Any thread, while
  // others use it; does nothing where the system cannot (Linux before 5.14, others).
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

// Memory of the host. Its last owner frees it, and what it came from after it.
using HostBlock = std::shared_ptr<uint8_t>;

// Where pages that leave a device get their memory: what that device copies fastest to and from.
struct HostMemory {
  std::function<HostBlock(size_t bytes)> allocate;  // throws Error(internal) when there is none
  // A large memory is best taken in pieces of so many bytes, when they are needed; 0: in one, which
  // the system gives out as it is used.
  size_t slab_bytes = 0;
  // Of such pieces, what is best had before it is needed: at the start, and then whenever there is
  // nothing else to do.
  size_t ahead_bytes = 0;
};
HostMemory plain_memory();  // blocks of it are aligned to 4 KiB

}  // namespace turbomind
