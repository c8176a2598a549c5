#include "core/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "core/error.h"

namespace turbomind {

namespace {
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPiece = 4 * kHugePage;
constexpr std::align_val_t kPage{4096};  // O_DIRECT reads need this alignment

HostBlock plain_block(size_t bytes) {
  if (bytes < kHugePage) {
    const auto free = [](uint8_t* data) { operator delete(data, kPage); };
    return HostBlock(static_cast<uint8_t*>(operator new(bytes, kPage)), free);
  }
  const auto buffer = std::make_shared<HugeBuffer>(bytes);
  return HostBlock(buffer, buffer->data());
}
}  // namespace

HugeBuffer::HugeBuffer(size_t bytes) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - 2 * kHugePage) {
    throw_error(ErrorCode::internal, "cannot allocate ", bytes,
                " bytes: more than an address holds");
  }
  // mmap aligns to 4 KiB only: one more huge page leaves room to align the start.
  mapped_ = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw_error(ErrorCode::internal, "cannot allocate ", bytes, " bytes: the system has no memory");
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(base_);
  data_ = reinterpret_cast<uint8_t*>((start + kHugePage - 1) / kHugePage * kHugePage);
  size_ = bytes;
#ifdef MADV_HUGEPAGE
  // Advice only: without transparent huge pages the buffer has 4 KiB pages.
  madvise(data_, mapped_ - kHugePage, MADV_HUGEPAGE);
#endif
}

void HugeBuffer::populate(size_t bytes) const {
#ifdef MADV_POPULATE_WRITE
  // In pieces, so that other threads can map memory in between.
  const size_t end = std::min(bytes, size_);
  for (size_t at = 0; at < end; at += kPiece)
    if (madvise(data_ + at, std::min(kPiece, end - at), MADV_POPULATE_WRITE) != 0) return;
#else
  static_cast<void>(bytes);
#endif
}

HugeBuffer::~HugeBuffer() {
  if (base_ != nullptr) munmap(base_, mapped_);
}

HostMemory plain_memory() {
  return {plain_block, 0, 0};
}

}  // namespace turbomind
