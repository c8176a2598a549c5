// Which pages are to be copied to the tiers below, and those on their way there.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "cache/kv_cache.h"
#include "tiers/page_mover.h"
#include "tiers/pending_removals.h"

namespace turbomind {

// Used by the engine thread. Full pages wait by name only, and may leave the device unsaved when
// their turn comes too late. An unfinished page is held from the beginning, so that whoever goes on
// writing it writes a copy. Few pages are held at a time, and those are given up under pressure.
class PageSaver {
 public:
  PageSaver(KvCache& kv, const Model& model, PageMover& mover, const PendingRemovals& removals);

  // The sealed pages of a sequence that were not posted yet.
  void post_sealed(Sequence& seq);
  // Everything of a sequence that the lowest tier lacks, its unfinished page too.
  void post_all(Sequence& seq);
  // Hands as much to the mover as may be on its way at a time.
  void pump();
  void finish(PageMove& move) noexcept;  // one that the mover is done with
  // Gives up the pages that are held: full ones are posted again, unfinished ones are not saved.
  // False when there are none.
  bool release_held() noexcept;
  // These are not saved, nor the unfinished pages behind them.
  void forget(const PendingRemovals& removals) noexcept;
  // Pages that were to be saved, could not be, and are not below by other ways.
  std::vector<BlockHash> unsaved();

  // Numbers of what was posted last, and of the oldest that is not finished (one more than `last`
  // when all is).
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
    bool foreign = false;                          // of an unfinished page
    std::vector<int32_t> tail;                     // per group; empty for a full page
    bool held = false;                             // tail: by the item, not by its moves
    std::vector<std::shared_ptr<PageMove>> moves;  // on their way
    int open = 0;                                  // of them
  };
  using Items = std::list<Item>;
  // What was not saved of a page.
  struct Unsaved {
    BlockHash parent;
    std::vector<int32_t> tokens;
    std::vector<bool> groups;
  };

  bool below(const BlockHash& key, int group, bool foreign) const;
  bool below(const BlockHash& key, const Unsaved& page, int group) const;
  void note_unsaved(const Item& item, int group) noexcept;
  void post_full(Sequence& seq, int64_t page);
  void post_tail(Sequence& seq);
  PageMover::Moves moves_of(Item& item);
  std::shared_ptr<PageMove> move_of(Item& item, int group, int32_t page) const;
  bool replaced(const Item& item) const noexcept;
  void post_again(Items::iterator item) noexcept;
  void drop(Items::iterator item, Items& from) noexcept;
  void release_held(Items::iterator item, Items& from) noexcept;
  bool take_back(Item& item) noexcept;

  KvCache& kv_;
  const Model& model_;
  PageMover& mover_;
  const PendingRemovals& removals_;
  const std::string foreign_numerics_;  // of pages that are built upon foreign ones
  int limit_ = 1;                       // moves on their way
  int moves_ = 0;
  Items queue_, moving_;
  std::unordered_set<BlockHash> known_;  // keys of the full pages in queue_ and moving_
  uint64_t last_ = 0;
  int64_t saved_ = 0, failed_ = 0;  // pages
  std::unordered_map<BlockHash, Unsaved> unsaved_;
};

}  // namespace turbomind
