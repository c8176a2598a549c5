// Idle handles in the order in which they lose their pages.
#pragma once

#include <cstdint>
#include <set>
#include <tuple>
#include <utility>

#include "engine/handle.h"

namespace turbomind {

// Each operation takes O(log handles), and those on a handle that has an Entry allocate nothing.
class IdleHandles {
  // The lowest retention priority comes first, then the one that was used the longest ago.
  using Rank = std::tuple<float, uint64_t, HandleId>;
  using Ranks = std::set<Rank>;

 public:
  // A handle's place in the order; empty for one that is not listed.
  class Entry {
   public:
    bool listed() const { return spare_.empty() && allocated_; }

   private:
    friend class IdleHandles;
    Ranks::iterator at_;
    Ranks::node_type spare_;
    bool allocated_ = false;
  };

  // Lists a handle that has no entry yet. Throws std::bad_alloc.
  void add(Entry& entry, HandleId handle, float retention_priority, uint64_t last_use) {
    entry.at_ = ranks_.emplace(retention_priority, last_use, handle).first;
    entry.allocated_ = true;
  }
  // Lists a handle, or moves it to its new place.
  void list(Entry& entry, HandleId handle, float retention_priority, uint64_t last_use) noexcept {
    unlist(entry);
    entry.spare_.value() = {retention_priority, last_use, handle};
    entry.at_ = ranks_.insert(std::move(entry.spare_)).position;
  }
  void unlist(Entry& entry) noexcept {
    if (entry.listed()) entry.spare_ = ranks_.extract(entry.at_);
  }
  Ranks::const_iterator begin() const { return ranks_.begin(); }
  Ranks::const_iterator end() const { return ranks_.end(); }
  static HandleId handle_of(const Rank& rank) { return std::get<2>(rank); }

 private:
  Ranks ranks_;
};

}  // namespace turbomind
