// Pages that are to be removed from the tiers and may still be found there.
#pragma once

#include <algorithm>
#include <list>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "engine/page_mover.h"

namespace turbomind {

// Used by the engine thread. A chore of the mover's removes the pages; until that is done they are
// as good as gone: not loaded, and saved again where they are computed again.
class PageRemovals {
 public:
  bool pending(const ChainKey& key) const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [&key](const Entry& entry) { return entry.keys.contains(key); });
  }
  // A stored page of `count` tokens; partial pages go with the one before them.
  bool pending(const ChainKey& key, const ChainKey& parent, int count) const {
    return pending(key) || (count < kPageTokens && pending(parent));
  }
  void add(std::shared_ptr<PageMove> chore, const std::vector<ChainKey>& keys) {
    entries_.push_back({std::move(chore), {keys.begin(), keys.end()}});
  }
  void finish(const PageMove& chore) noexcept {
    entries_.remove_if([&chore](const Entry& entry) { return entry.chore.get() == &chore; });
  }

 private:
  struct Entry {
    std::shared_ptr<PageMove> chore;
    std::unordered_set<ChainKey> keys;
  };
  std::list<Entry> entries_;
};

}  // namespace turbomind
