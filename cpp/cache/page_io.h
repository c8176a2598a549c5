// The memory of a model's pages as the engine and the tiers see it: allocation, copies between
// pages, and payloads in stored order (cache/page_codec.h). Which pages belong to which sequence is
// bookkeeping of KvCache, not of this interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/memory.h"

namespace turbomind {

// One piece of a payload. A payload is one piece of memory or several, in order. Pieces in
// host_memory() begin at multiples of 16 bytes, in memory as in the payload.
struct PayloadPart {
  uint8_t* data = nullptr;
  size_t bytes = 0;
};

// Copies the first `count` of the `stored` tokens of the payload; a copy from the device has stored
// = count.
struct PageTransfer {
  int group = 0;
  int32_t page = -1;
  int count = 0;
  int stored = 0;
  std::vector<PayloadPart> parts;
};

// Copies of pages that a device makes beside the host. The destructor waits for them.
class PageCopies {
 public:
  virtual ~PageCopies() = default;
  // Returns when all are done; called once.
  virtual void wait() = 0;
};

// `group` is an index into Model::groups(), `page` an index below the number of its pages.
// `count` and `stored` are tokens, 1 to kPageTokens.
//
// stored_page_bytes, read_*, write_*, submit_* and prepare_pages may be called by any thread, also
// during Model::forward(), for pages that no other thread uses at the same time. The rest is for
// the thread that runs the steps.
class PageIo {
 public:
  virtual ~PageIo() = default;

  // Allocates pages[g] pages for each group g. Called once, before the first forward(); an empty
  // list, after the last one, frees them. Throws std::bad_alloc or Error(internal) when there is no
  // memory.
  virtual void allocate_pages(const std::vector<int64_t>& pages) = 0;
  // Backs the first `pages` pages of every group, or all where it has fewer, with physical memory,
  // which the operating system otherwise hands out at first use. Contents stay.
  virtual void prepare_pages(int64_t) {}
  // Copies the whole page `src` over page `dst`, after all steps that were submitted.
  virtual void copy_page(int group, int32_t src, int32_t dst) = 0;

  // Returns the size of a payload of `count` tokens, in bytes.
  virtual size_t stored_page_bytes(int group, int count) const = 0;
  // Writes the payload of the page's first `count` tokens to `out`.
  virtual void read_page(int group, int32_t page, int count, uint8_t* out) const = 0;
  // Fills the page's first `count` tokens from a payload of `stored` tokens. A sequence may append
  // after them.
  virtual void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) = 0;
  void write_page(int group, int32_t page, int count, const uint8_t* in) {
    write_page(group, page, count, in, count);
  }
  // The same for several pages, whose parts lie in blocks of host_memory(). Returns when all are
  // done.
  virtual void read_pages(const std::vector<PageTransfer>& transfers) const;
  virtual void write_pages(const std::vector<PageTransfer>& transfers);
  // The same, but may return before the copies are done, whose end is then to be waited for. The
  // transfers and their parts stay until then. Null: they are done.
  virtual std::unique_ptr<PageCopies> submit_reads(
      const std::vector<PageTransfer>& transfers) const {
    read_pages(transfers);
    return nullptr;
  }
  virtual std::unique_ptr<PageCopies> submit_writes(const std::vector<PageTransfer>& transfers) {
    write_pages(transfers);
    return nullptr;
  }

  // Returns how many pages are best transferred by one call. Above 1, a payload may lie in any
  // number of parts without an extra copy; at 1 a payload in one part is the fastest.
  virtual int page_batch() const { return 1; }
  // Returns the allocator of the host memory that this device copies to and from the fastest.
  virtual HostMemory host_memory() const { return plain_memory(); }
};

}  // namespace turbomind
