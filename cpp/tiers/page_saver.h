// Saves pages of sequences that persist to the lower tiers: a queue of pages, and those in flight.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "cache/kv_cache.h"
#include "tiers/page_mover.h"
#include "tiers/pending_removals.h"

namespace turbomind {

// Used by the engine thread. Full pages wait by block hash only, and may be evicted before their
// turn. An unfinished page is referenced while it waits, so that a sequence that goes on writes to
// a copy. Few pages are referenced at a time, and they are released under memory pressure.
class PageSaver {
 public:
  PageSaver(KvCache& kv, const Model& model, PageMover& mover, const PendingRemovals& removals);

  // Queues the sealed pages of a sequence that were not queued yet.
  void post_sealed(Sequence& seq);
  // Queues all pages of a sequence that the lowest tier lacks, its unfinished page included.
  void post_all(Sequence& seq);
  // Queues the full pages of a sequence for the host tier only, which is the first tier.
  void post_offload(Sequence& seq);
  // Posts queued pages to the mover, up to the limit of pages in flight.
  void pump();
  // Takes the result of a save that the mover is done with.
  void finish(PageMove& move) noexcept;
  // Releases the pages of one save: a full one is queued again, an unfinished one is not saved.
  // Returns false when none is held.
  bool release_held() noexcept;
  // Drops pages that are being removed, and unfinished pages that follow them.
  void forget(const PendingRemovals& removals) noexcept;
  // Returns pages whose save failed and that the lowest tier still lacks.
  std::vector<BlockHash> unsaved();

  // Numbers of the page queued last, and of the oldest one that is not finished (last() + 1: none).
  uint64_t last() const { return last_; }
  uint64_t oldest() const;
  int64_t saved() const { return saved_; }
  int64_t failed() const { return failed_; }
  void add_held(std::vector<HeldPage>& held) const;

 private:
  struct Item {
    uint64_t number = 0;
    PageIdentity identity;
    int count = kPageTokens;
    float retention_priority = 0;
    bool foreign = false;       // of an unfinished page
    bool host_only = false;     // a copy in host memory suffices; it may be lost
    bool again = false;         // it has to go to all tiers, but was posted for the host tier only
    std::vector<int32_t> tail;  // [group] device pages; empty for a full page
    bool held = false;          // the item has the references of `tail`, not its moves
    std::vector<std::shared_ptr<PageMove>> moves;  // in flight
    int open = 0;                                  // moves not finished
  };
  using Items = std::list<Item>;
  // The groups of a page whose save failed.
  struct Unsaved {
    BlockHash parent;
    std::vector<int32_t> tokens;
    std::vector<bool> groups;
  };

  bool in_lowest(const BlockHash& key, int group, bool foreign) const;
  bool in_lowest(const BlockHash& key, const Unsaved& page, int group) const;
  void record_unsaved(const Item& item, int group) noexcept;
  void post_full(Sequence& seq, int64_t page, bool host_only);
  bool stored(const Item& item, int group, bool foreign) const;
  void post_tail(Sequence& seq);
  PageMover::Moves moves_of(Item& item);
  std::shared_ptr<PageMove> move_of(Item& item, int group, int32_t page) const;
  bool replaced(const Item& item) const noexcept;
  void queue_again(Items::iterator item) noexcept;
  void drop(Items::iterator item, Items& from) noexcept;
  void release_held(Items::iterator item, Items& from) noexcept;
  bool revoke(Item& item) noexcept;

  KvCache& kv_;
  const Model& model_;
  PageMover& mover_;
  const PendingRemovals& removals_;
  const std::string foreign_numerics_;  // of pages computed from foreign KV
  int limit_ = 1;                       // most moves in flight
  int moves_ = 0;
  Items queue_, moving_;
  std::unordered_map<BlockHash, Item*> known_;  // the full pages in queue_ and moving_
  uint64_t last_ = 0;
  int64_t saved_ = 0, failed_ = 0;  // pages
  std::unordered_map<BlockHash, Unsaved> unsaved_;
};

}  // namespace turbomind
