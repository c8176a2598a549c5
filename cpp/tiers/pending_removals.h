// Pages that are being removed from the tiers and may still be found there.
#pragma once

#include <algorithm>
#include <list>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tiers/page_mover.h"

namespace turbomind {

// Used by the engine thread. A task of the mover removes the pages. Until it is done, they are
// treated as absent: not loaded, and saved again when they are computed again.
class PendingRemovals {
 public:
  // Returns whether the page is being removed.
  bool pending(const BlockHash& key) const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [&key](const Entry& entry) { return entry.keys.contains(key); });
  }
  // The same for a stored page of `count` tokens: a partial page is removed with its parent.
  bool pending(const BlockHash& key, const BlockHash& parent, int count) const {
    return pending(key) || (count < kPageTokens && pending(parent));
  }
  // Begins and ends the removal of `keys` by `task`.
  void add(std::shared_ptr<PageMove> task, const std::vector<BlockHash>& keys) {
    entries_.push_back({std::move(task), {keys.begin(), keys.end()}});
  }
  void finish(const PageMove& task) noexcept {
    entries_.remove_if([&task](const Entry& entry) { return entry.task.get() == &task; });
  }

 private:
  struct Entry {
    std::shared_ptr<PageMove> task;
    std::unordered_set<BlockHash> keys;
  };
  std::list<Entry> entries_;
};

}  // namespace turbomind
