// Pages in the host's memory, below those of the device.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cache/kv_layout.h"
#include "cache/lower_tier.h"
#include "cache/page_index.h"
#include "core/memory.h"

namespace turbomind {

// Bytes are trusted as those of the device's pages are: nothing checks them again.
//
// A page leaves in order of (keep value, last use) to make room for one that is worth as much or
// more. One with another behind it stays until that one has left, since nobody could reach that one
// without it; in a window's group only the newest pages matter, so there the order alone decides.
class HostTier final : public LowerTier {
 public:
  struct Options {
    int64_t quota = 0;     // bytes of payload
    std::string numerics;  // numerics id: pages of another one are foreign
    std::vector<CacheKind> groups = {CacheKind::full};
    size_t page_bytes = 1 << 20;  // payload of a full page, the smallest group's where they differ
  };
  // Reserves addresses for `quota`, takes memory as pages come. Throws Error(internal) when the
  // system has none.
  explicit HostTier(const Options& options);

  std::optional<PageRef> find(const ChainKey& key, int group) const override;
  std::optional<PageRef> find_beginning(const ChainKey& parent, int group, const int32_t* tokens,
                                        int count, int* shared) const override;
  bool read(const PageRef& ref, StoredPage* page, uint8_t* payload) override;
  // Replaces a foreign page by one that is not. False when there is no room, or the page does not
  // carry its name (then counted as damaged).
  bool write(const StoredPage& page, const uint8_t* payload) override;
  // A chain's pages from the first one on.
  void touch(const std::vector<ChainKey>& keys, float keep_value) override;
  void remove(const std::vector<ChainKey>& keys) override;
  void keep_only(const std::vector<ChainKey>& keys) override;  // and partial pages behind them
  TierStats stats() const override;

 private:
  struct Entry;
  using EntryPtr = std::shared_ptr<Entry>;
  using Order = std::map<std::pair<float, uint64_t>, Entry*>;  // by (keep value, last use)
  struct Entry : StoredPage {  // its keep_value is the first one, what counts is in `rank`
    uint64_t id = 0;
    bool foreign = false;
    bool listed = false;           // its name is taken by it
    int readers = 0;               // outside the lock, of its pieces
    std::vector<uint32_t> pieces;  // of memory_
    Order::node_type rank;         // here while it is not in order_
    float keep = 0;
    uint64_t last_use = 0;
  };

  EntryPtr make_entry(const StoredPage& page) const;
  bool well_formed(const StoredPage& page) const;
  PageRef ref_of(const Entry& entry) const;
  uint8_t* piece(uint32_t index) const { return memory_.data() + index * piece_bytes_; }
  template <typename F>
  void each_piece(const Entry& entry, F&& f) const;

  // All below: with the lock held.
  bool has(const Entry& entry);
  bool take_pieces(Entry& entry);
  bool severed(const Entry& entry, const Entry& victim);
  void give_back(Entry& entry);
  void list(const EntryPtr& entry);
  void unlist(Entry& entry);
  void use(Entry& entry, float keep);
  void rank(Entry& entry);  // puts it in order_, or takes it out, as its followers demand

  const Options options_;
  const size_t piece_bytes_;
  const int64_t total_pieces_;
  HugeBuffer memory_;

  mutable std::mutex mutex_;
  std::vector<uint32_t> free_;                      // pieces given back
  int64_t fresh_ = 0;                               // pieces from here on were never used
  std::unordered_map<uint64_t, EntryPtr> entries_;  // by id
  PageIndex<Entry> names_;
  Order order_;
  std::unordered_set<ChainKey> severed_;  // pages refused since the one before them is not here
  uint64_t clock_ = 0;
  TierStats counts_;
};

}  // namespace turbomind
