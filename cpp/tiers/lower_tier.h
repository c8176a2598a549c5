// A place below the device where pages live on: the host's memory, a disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cache/block_hash.h"
#include "cache/page_transfer.h"

namespace turbomind {

// What a stored page says about itself. Full pages have kPageTokens tokens, partial ones fewer: the
// end of a sequence that was closed. The payload is in canonical order (cache/page_codec.h), so the
// first tokens of any page are of use to whoever has just those.
struct StoredPage {
  BlockHash key;            // of (parent, tokens)
  BlockHash parent;         // of the page before it; the root key for a first page
  int group = 0;            // cache group
  std::string fingerprint;  // of the model
  std::string
      numerics;        // numerics fingerprint: pages of another one are good, though not bit-equal
  int first_head = 0;  // head range of the rank that computed it
  int heads = 0;       // 0: all of them
  std::vector<int32_t> tokens;
  size_t payload_bytes = 0;
  float retention_priority = 0;  // how much it is worth keeping; not part of its identity
};

// Where a tier has a page. Stays valid after the page has left: read() then says so.
struct PageRef {
  BlockHash key;
  BlockHash parent;
  int group = 0;
  int count = 0;  // tokens
  size_t payload_bytes = 0;
  bool foreign = false;    // of another numerics fingerprint than the tier's own
  uint64_t place[2] = {};  // the tier's
};

struct TierStats {
  int64_t pages = 0;
  int64_t bytes = 0;  // in use, headers included
  int64_t quota = 0;  // bytes; 0: no limit
  int64_t reads = 0;
  int64_t writes = 0;
  int64_t evicted = 0;
  int64_t damaged = 0;       // torn, foreign or changed ones that were met and forgotten
  int64_t write_errors = 0;  // the disk is full or cannot be written
};

// A page whose payload is in a tier's own memory. While this lives the memory is nobody else's.
struct BorrowedPage {
  virtual ~BorrowedPage() = default;
  StoredPage page;
  std::vector<PayloadPart> parts;  // page.payload_bytes together
};

// Any thread. Nothing throws but for lack of memory; what cannot be done is counted.
class LowerTier {
 public:
  virtual ~LowerTier() = default;

  // Lookups touch memory only, under a lock that is held for microseconds.
  virtual std::optional<PageRef> find(const BlockHash& key, int group) const = 0;
  // Of the pages behind `parent` the one that shares the longest beginning with `tokens` [count];
  // `shared` is its length. None when that is 0.
  virtual std::optional<PageRef> find_beginning(const BlockHash& parent, int group,
                                                const int32_t* tokens, int count,
                                                int* shared) const = 0;

  // Verifies all of it. False when it has left or is damaged; then it is not found again. `payload`
  // has room for ref.payload_bytes.
  virtual bool read(const PageRef& ref, StoredPage* page, uint8_t* payload) = 0;
  // True when the tier has the page now. One that it has already only gets the higher retention
  // priority.
  virtual bool write(const StoredPage& page, const uint8_t* payload) = 0;

  // As read() and write(), for who copies payloads from and to the tier's own memory: lend() gives
  // one to read, make_room() one to fill, which keep() then adds to the tier's pages. Null where
  // read() or write() have something else to say, and of tiers without such memory.
  virtual std::unique_ptr<BorrowedPage> lend(const PageRef&) { return nullptr; }
  virtual std::unique_ptr<BorrowedPage> make_room(const StoredPage&) { return nullptr; }
  virtual bool keep(BorrowedPage&) { return false; }

  virtual void touch(const std::vector<BlockHash>& keys,
                     float retention_priority) = 0;  // sets the value
  // Partial pages behind a removed page go too.
  virtual void remove(const std::vector<BlockHash>& keys) = 0;
  virtual void keep_only(const std::vector<BlockHash>& keys) = 0;
  virtual void refresh() {}   // takes over what other processes have done
  virtual void sync() {}      // what was written survives the death of the machine
  virtual void maintain() {}  // a bounded piece of eviction and compaction
  virtual TierStats stats() const = 0;
};

}  // namespace turbomind
