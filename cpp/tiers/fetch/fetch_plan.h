// What the tiers below have of a sequence's beginning.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "cache/kv_cache.h"
#include "tiers/fetch/fetch_cost.h"
#include "tiers/page_mover.h"
#include "tiers/pending_removals.h"

namespace turbomind {

// A page that is being loaded, for one fetch or for several.
struct PageLoad {
  PageIdentity identity;  // of a full page
  bool full = true;       // others are a beginning for one sequence alone
  int group = 0;
  int32_t page = -1;  // held once
  size_t tier = 0;    // as planned; another one may turn out to have it
  int64_t bytes = 0;
  std::shared_ptr<PageMove> move;
  int wanted = 0;  // fetches that wait for it
};
using PageLoads = std::list<PageLoad>;

// A page, or the beginning of one, and where it is.
struct PlannedPage {
  int group = 0;
  int64_t index = 0;    // in the sequence
  int32_t device = -1;  // page of the device
  PageLoad* load = nullptr;
  PageRef ref;  // otherwise
  size_t tier = 0;
  bool found() const { return device >= 0 || load || ref.count > 0; }
  bool in_tier() const { return device < 0 && !load; }
};

// The longest beginning that the device and the tiers below have together.
struct FetchPlan {
  int64_t tokens = 0;               // what the sequence has already where there is nothing more
  int64_t loaded = 0;               // of them, that are not on the device yet
  int64_t first_loaded = 0;         // the first of those
  int64_t missing = kNoToken;       // page that is nowhere, and ends it
  std::vector<PlannedPage> pages;   // in order of the sequence; only those in reach
  std::vector<int64_t> first_held;  // per group
  std::vector<TierLoad> loads;      // per tier
};

// Pages in a row that the device and the tiers have, behind some that are missing.
struct FoundRange {
  int64_t begin = 0, end = 0;  // pages; empty where there are no more
  std::vector<TierLoad> loads;
};

class FetchPlanner {
 public:
  // Looks at the first `tiers` of them alone.
  FetchPlanner(KvCache& kv, const std::vector<LowerTier*>& tiers, const PendingRemovals& removals,
               PageLoads& loads, size_t most)
      : kv_(kv), tiers_(tiers.begin(), tiers.begin() + most), removals_(removals), loads_(loads) {}

  // Of the first `most` tokens. `exact`: foreign pages are not there.
  FetchPlan plan(Sequence& seq, int64_t most, bool exact);
  // The next one from `page` on, of groups that need every page: what windows see will have been
  // computed by then.
  FoundRange next_range(Sequence& seq, int64_t page, int64_t most, bool exact);

 private:
  using Found = std::vector<std::vector<PlannedPage>>;  // [group][page - first looked for]

  int64_t find_full(Sequence& seq, int64_t most, bool exact);  // pages looked at
  bool find_page(Sequence& seq, int64_t page, bool exact);
  bool add_page(Sequence& seq, int64_t page, bool exact, std::vector<TierLoad>& loads);
  PlannedPage locate(int group, const PageIdentity& identity, bool exact);
  int64_t find_partial(Sequence& seq, int64_t page, int64_t most, bool exact);  // tokens
  bool in_reach(int64_t page, int64_t tokens) const;
  void fill_plan(const Sequence& seq, FetchPlan& plan, bool partial);

  KvCache& kv_;
  std::vector<LowerTier*> tiers_;
  const PendingRemovals& removals_;
  PageLoads& loads_;
  int64_t first_ = 0;                 // page looked for
  std::vector<int64_t> consecutive_;  // per group: pages in a row up to the last one looked at
  int64_t usable_ = 0;                // full pages
  Found found_;
  std::vector<PlannedPage> partial_;  // per group
};

}  // namespace turbomind
