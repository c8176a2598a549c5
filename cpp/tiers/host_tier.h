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
#include "core/memory.h"
#include "tiers/lower_tier.h"
#include "tiers/page_index.h"

namespace turbomind {

// Bytes are trusted as those of the device's pages are: nothing checks them again.
//
// A page leaves in order of (retention priority, last use) to make room for one that is worth as
// much or more. One with another behind it stays until that one has left, since nobody could reach
// that one without it; in a window's group only the newest pages matter, so there the order alone
// decides.
class HostTier final : public LowerTier {
 public:
  struct Options {
    int64_t quota = 0;     // bytes of payload
    std::string numerics;  // numerics fingerprint: pages of another one are foreign
    std::vector<CacheKind> groups = {CacheKind::full};
    size_t page_bytes = 1 << 20;  // payload of a full page, the smallest group's where they differ
    HostMemory memory = plain_memory();
  };
  // Plain memory has its addresses reserved for `quota` (Error(internal) when the system has none)
  // and is taken as pages come; other memory is asked for slab by slab, some of it ahead of the
  // pages, and where it ends early the tier is full.
  explicit HostTier(const Options& options);

  std::optional<PageRef> find(const BlockHash& key, int group) const override;
  std::optional<PageRef> find_beginning(const BlockHash& parent, int group, const int32_t* tokens,
                                        int count, int* shared) const override;
  bool read(const PageRef& ref, StoredPage* page, uint8_t* payload) override;
  // Replaces a foreign page by one that is not. False when there is no room, or the page does not
  // carry its name (then counted as damaged).
  bool write(const StoredPage& page, const uint8_t* payload) override;
  std::unique_ptr<BorrowedPage> lend(const PageRef& ref) override;
  std::unique_ptr<BorrowedPage> make_room(const StoredPage& page) override;
  bool keep(BorrowedPage& borrowed) override;
  // A chain's pages from the first one on.
  void touch(const std::vector<BlockHash>& keys, float retention_priority) override;
  void remove(const std::vector<BlockHash>& keys) override;
  void keep_only(const std::vector<BlockHash>& keys) override;  // and partial pages behind them
  void maintain() override;  // a slab, where fewer are ahead than there should be
  TierStats stats() const override;

 private:
  struct Entry;
  using EntryPtr = std::shared_ptr<Entry>;
  using Order = std::map<std::pair<float, uint64_t>, Entry*>;  // by (retention priority, last use)
  struct Entry : StoredPage {  // its retention_priority is the first one, what counts is in `rank`
    uint64_t id = 0;
    bool foreign = false;
    bool listed = false;           // its name is taken by it
    int users = 0;                 // of its pieces, outside the lock
    std::vector<uint32_t> pieces;  // of the slabs
    Order::node_type rank;         // here while it is not in order_
    float keep = 0;
    uint64_t last_use = 0;
  };

  struct Lent;

  EntryPtr make_entry(const StoredPage& page) const;
  bool well_formed(const StoredPage& page) const;
  PageRef ref_of(const Entry& entry) const;
  std::unique_ptr<Lent> place(const StoredPage& page, bool* there);
  std::unique_ptr<Lent> lend_entry(EntryPtr entry);
  void end_use(Entry& entry) noexcept;
  void add_slab(int64_t ready);
  uint8_t* piece(uint32_t index) const {
    return slabs_[index / slab_pieces_].get() + index % slab_pieces_ * piece_bytes_;
  }

  // All below: with the lock held.
  bool has(const Entry& entry);
  int64_t pieces_of(const Entry& entry) const;
  int64_t room() const { return static_cast<int64_t>(free_.size()) + ready_ - fresh_; }
  bool wants_slab() const { return room() < ahead_pieces_ && ready_ < total_pieces_; }
  bool take_pieces(Entry& entry);
  bool severed(const Entry& entry, const Entry& victim);
  void give_back(Entry& entry);
  void list(const EntryPtr& entry);
  void unlist(Entry& entry);
  void use(Entry& entry, float keep);
  void rank(Entry& entry);  // puts it in order_, or takes it out, as its followers demand

  const Options options_;
  const size_t piece_bytes_;
  const int64_t most_pieces_;     // that the quota allows
  const int64_t slab_pieces_;     // of a slab; the last may have fewer
  const int64_t ahead_pieces_;    // that are best ready and unused
  std::vector<HostBlock> slabs_;  // never moves
  std::mutex growing_;            // taken before the other one, while a slab is made

  mutable std::mutex mutex_;
  int64_t total_pieces_;        // fewer than most_pieces_ where memory has ended
  int64_t ready_ = 0;           // pieces that there is memory for
  std::vector<uint32_t> free_;  // pieces given back
  int64_t fresh_ = 0;           // pieces from here on were never used
  std::unordered_map<uint64_t, EntryPtr> entries_;  // by id
  PageIndex<Entry> names_;
  Order order_;
  std::unordered_set<BlockHash> severed_;  // pages refused since the one before them is not here
  uint64_t clock_ = 0;
  TierStats counts_;
};

}  // namespace turbomind
