// Pages that are to be removed from the tiers and may still be found there.
#pragma once

#include <algorithm>
#include <list>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tiers/page_mover.h"

namespace turbomind {

// Used by the engine thread. A task of the mover's removes the pages; until that is done they are
// as good as gone: not loaded, and saved again where they are computed again.
class PendingRemovals {
 public:
  bool pending(const BlockHash& key) const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [&key](const Entry& entry) { return entry.keys.contains(key); });
  }
  // A stored page of `count` tokens; partial pages go with the one before them.
  bool pending(const BlockHash& key, const BlockHash& parent, int count) const {
    return pending(key) || (count < kPageTokens && pending(parent));
  }
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
