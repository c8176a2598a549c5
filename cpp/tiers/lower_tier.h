// Interface of a lower tier: a store of pages beside the device, in host memory or on a disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/block_hash.h"
#include "cache/page_io.h"

namespace turbomind {

// Description of a stored page. A full page has kPageTokens tokens, a partial one fewer: the end of
// a sequence that was closed. The payload has canonical order (cache/page_codec.h), so a sequence
// with the page's first tokens can use that part of it.
struct StoredPage {
  BlockHash key;            // block hash of (parent, tokens)
  BlockHash parent;         // block hash of the previous page; the root for a first page
  int group = 0;            // cache group
  std::string fingerprint;  // of the model
  // Numerics fingerprint: KV of another one is correct, but not bit-identical.
  std::string numerics;
  int first_head = 0;  // head range of the rank that computed it
  int heads = 0;       // 0: all heads
  std::vector<int32_t> tokens;
  size_t payload_bytes = 0;
  float retention_priority = 0;  // not part of its identity
};

// Place of a page in a tier. It may outlive the page: read() then returns false.
struct PageRef {
  BlockHash key;
  BlockHash parent;
  int group = 0;
  int count = 0;  // tokens
  size_t payload_bytes = 0;
  bool foreign = false;    // of another numerics fingerprint than the tier's own
  uint64_t place[2] = {};  // private to the tier
};

// Counters run from the start of the tier.
struct TierStats {
  int64_t pages = 0;
  int64_t bytes = 0;  // in use, headers included
  int64_t quota = 0;  // bytes; 0: no limit
  int64_t reads = 0;
  int64_t writes = 0;
  int64_t evicted = 0;
  int64_t damaged = 0;       // pages that failed verification and were removed
  int64_t write_errors = 0;  // the disk is full or not writable
};

// A page whose payload is in a tier's own memory, which is not reused while this object lives.
struct BorrowedPage {
  virtual ~BorrowedPage() = default;
  StoredPage page;
  std::vector<PayloadPart> parts;  // page.payload_bytes in all
};

// Any thread. Methods throw std::bad_alloc only; other failures are counted in stats().
class LowerTier {
 public:
  virtual ~LowerTier() = default;

  // Returns whether pages are in memory, so that they are lost with the process.
  virtual bool in_host_memory() const { return false; }
  // Returns the page of a group with this block hash. Lookups use memory only, under a lock that is
  // held for microseconds.
  virtual std::optional<PageRef> find(const BlockHash& key, int group) const = 0;
  // Returns the page after `parent` that shares the longest prefix with `tokens` [count], and the
  // length of that prefix in `shared`; none when that is 0.
  virtual std::optional<PageRef> find_prefix(const BlockHash& parent, int group,
                                             const int32_t* tokens, int count,
                                             int* shared) const = 0;

  // Reads and verifies a page. Returns false when it has left or is damaged; then it is not found
  // again. `payload`: [ref.payload_bytes].
  virtual bool read(const PageRef& ref, StoredPage* page, uint8_t* payload) = 0;
  // Stores a page. Returns whether the tier has it now. A page that it has already gets the higher
  // of the two retention priorities.
  virtual bool write(const StoredPage& page, const uint8_t* payload) = 0;

  // The same as read() and write() for callers that copy payloads from and to the tier's own
  // memory: borrow() returns a page to read, reserve() one to fill, which insert() then adds to the
  // tier. Both return null when read() or write() would fail or have nothing to copy, and for tiers
  // without such memory.
  virtual std::unique_ptr<BorrowedPage> borrow(const PageRef&) { return nullptr; }
  virtual std::unique_ptr<BorrowedPage> reserve(const StoredPage&) { return nullptr; }
  virtual bool insert(BorrowedPage&) { return false; }

  // Sets the retention priority of pages; `keys` are those of a sequence, from the first page on.
  virtual void touch(const std::vector<BlockHash>& keys, float retention_priority) = 0;
  // Removes pages, and those that follow them: partial ones, and on a disk all, which hold tokens
  // that nobody can use any more.
  virtual void remove(const std::vector<BlockHash>& keys) = 0;
  // Removes all other pages, but for partial ones that follow these.
  virtual void retain_only(const std::vector<BlockHash>& keys) = 0;
  // Reads what other processes have changed.
  virtual void refresh() {}
  // Makes written pages survive a crash of the machine.
  virtual void sync() {}
  // Does a bounded piece of eviction and compaction.
  virtual void maintain() {}
  virtual TierStats stats() const = 0;
};

}  // namespace turbomind
