// Pages that are being loaded from lower tiers, found by identity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <unordered_map>
#include <vector>

#include "cache/kv_cache.h"
#include "tiers/fetch/fetch_cost.h"
#include "tiers/page_mover.h"

namespace turbomind {

struct PageFetch;

// A page that is being loaded, for one fetch or for several.
struct PageLoad {
  // A place of a fetch (PageFetch::places) that waits for the page.
  struct Waiter {
    PageFetch* fetch;
    size_t place;
  };
  PageIdentity identity;  // of a full page
  bool full = true;       // false: the first tokens of a page, for one sequence alone
  int group = 0;
  int32_t page = -1;  // device page, with one reference
  size_t tier = 0;    // as planned; the load may find the page in another one
  int64_t bytes = 0;
  std::shared_ptr<PageMove> move;
  std::vector<Waiter> waiters;         // at least one
  std::list<PageLoad>::iterator self;  // set by PageLoads
};

// Every operation takes constant time per page, so that a fetch takes time in proportion to its
// pages: 1M tokens are 16,384 pages per cache group.
class PageLoads {
 public:
  using List = std::list<PageLoad>;
  using Index = std::unordered_multimap<BlockHash, PageLoad*>;

  explicit PageLoads(size_t tiers) : totals_(tiers) {}

  // Returns the load of a full page, or null.
  PageLoad* find(int group, const PageIdentity& identity, bool exact) const;

  // Returns the index of loads that will be added, and makes room for it; add() then throws
  // nothing. Throws std::bad_alloc.
  Index prepare(List& fresh);
  void add(List&& fresh, Index&& index) noexcept;
  void erase(PageLoad& load) noexcept;

  // Returns the pages and bytes that are being loaded, per tier.
  const std::vector<TierLoad>& totals() const { return totals_; }
  List::const_iterator begin() const { return loads_.begin(); }
  List::const_iterator end() const { return loads_.end(); }

 private:
  List loads_;
  Index index_;  // of full pages
  std::vector<TierLoad> totals_;
};

}  // namespace turbomind
