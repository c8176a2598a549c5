// The lower tier in host memory.
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
#include "core/memory.h"
#include "tiers/lower_tier.h"
#include "tiers/page_index.h"

namespace turbomind {

// Payloads have no checksum, as pages of the device have none.
//
// Pages are evicted in order of (retention priority, last use) for a page of at least the same
// priority. A page that another one follows is evicted after that one, which could not be reached
// without it; in a window's group only the newest pages matter, so there the order alone decides.
class HostTier final : public LowerTier {
 public:
  struct Options {
    int64_t quota = 0;     // bytes of payload
    std::string numerics;  // own numerics fingerprint: pages of another one are foreign
    std::vector<CacheKind> groups = {CacheKind::full};
    size_t page_bytes = 1 << 20;  // payload of a full page of the smallest group
    HostMemory memory = plain_memory();
  };
  // Reserves addresses for `quota` (throws Error(internal) when the system has none) and uses plain
  // memory as pages come. Other memory is allocated slab by slab, some in advance; when it ends
  // early, the tier is full.
  explicit HostTier(const Options& options);

  bool in_host_memory() const override { return true; }
  std::optional<PageRef> find(const BlockHash& key, int group) const override;
  std::optional<PageRef> find_prefix(const BlockHash& parent, int group, const int32_t* tokens,
                                     int count, int* shared) const override;
  bool read(const PageRef& ref, StoredPage* page, uint8_t* payload) override;
  // Replaces a foreign page by one that is not. Returns false when there is no room, or when the
  // page does not match its hash (then counted as damaged).
  bool write(const StoredPage& page, const uint8_t* payload) override;
  std::unique_ptr<BorrowedPage> borrow(const PageRef& ref) override;
  std::unique_ptr<BorrowedPage> reserve(const StoredPage& page) override;
  bool insert(BorrowedPage& borrowed) override;
  void touch(const std::vector<BlockHash>& keys, float retention_priority) override;
  void remove(const std::vector<BlockHash>& keys) override;
  void retain_only(const std::vector<BlockHash>& keys) override;
  void maintain() override;  // allocates a slab when too few pieces are in reserve
  TierStats stats() const override;

 private:
  struct Entry;
  using EntryPtr = std::shared_ptr<Entry>;
  using Order = std::map<std::pair<float, uint64_t>, Entry*>;  // by (retention priority, last use)
  struct Entry : StoredPage {  // `priority` counts, not its retention_priority
    uint64_t id = 0;
    bool foreign = false;
    bool listed = false;           // it is in names_
    int users = 0;                 // readers and writers of its pieces outside the lock
    std::vector<uint32_t> pieces;  // of the slabs
    Order::node_type rank;         // its node while it is not in order_
    float priority = 0;
    uint64_t last_use = 0;
  };

  struct Borrowed;

  EntryPtr make_entry(const StoredPage& page) const;
  bool well_formed(const StoredPage& page) const;
  PageRef ref_of(const Entry& entry) const;
  std::unique_ptr<Borrowed> place(const StoredPage& page, bool* there);
  std::unique_ptr<Borrowed> borrow_entry(EntryPtr entry);
  void end_use(Entry& entry) noexcept;
  void add_slab(int64_t ready);
  uint8_t* piece(uint32_t index) const {
    return slabs_[index / slab_pieces_].get() + index % slab_pieces_ * piece_bytes_;
  }

  // The rest is called with mutex_ held.
  bool has(const Entry& entry);
  int64_t pieces_of(const Entry& entry) const;
  int64_t room() const { return static_cast<int64_t>(free_.size()) + ready_ - fresh_; }
  bool wants_slab() const { return room() < reserve_pieces_ && ready_ < total_pieces_; }
  bool take_pieces(Entry& entry);
  bool unreachable(const Entry& entry, const Entry& victim);
  void release(Entry& entry);
  void list(const EntryPtr& entry);
  void unlist(Entry& entry);
  void use(Entry& entry, float priority);
  void rank(Entry& entry);  // adds it to order_ when no page follows it, else takes it out

  const Options options_;
  const size_t piece_bytes_;
  const int64_t most_pieces_;     // by the quota
  const int64_t slab_pieces_;     // of a slab; the last one may have fewer
  const int64_t reserve_pieces_;  // that maintain() has ready and unused
  std::vector<HostBlock> slabs_;  // its elements never move
  std::mutex growing_;            // taken before mutex_, while a slab is allocated

  mutable std::mutex mutex_;
  int64_t total_pieces_;                            // fewer than most_pieces_ when memory has ended
  int64_t ready_ = 0;                               // pieces with memory
  std::vector<uint32_t> free_;                      // released pieces
  int64_t fresh_ = 0;                               // pieces from here on were never used
  std::unordered_map<uint64_t, EntryPtr> entries_;  // by id
  PageIndex<Entry> names_;
  Order order_;
  std::unordered_set<BlockHash>
      unreachable_;  // pages refused because their parent would be evicted
  uint64_t clock_ = 0;
  TierStats counts_;
};

}  // namespace turbomind
