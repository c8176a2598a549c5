// Plans fetches: finds the longest prefix of a sequence that the device and the lower tiers have
// together. Whether to load it is decided by PageFetcher.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_cache.h"
#include "tiers/fetch/fetch_cost.h"
#include "tiers/fetch/page_loads.h"
#include "tiers/pending_removals.h"

namespace turbomind {

// A page, or its first tokens, and its place: the device, a load in flight, or a tier.
struct PlannedPage {
  int group = 0;
  int64_t index = 0;         // in the sequence
  int32_t device = -1;       // device page, or -1
  PageLoad* load = nullptr;  // null: none in flight
  PageRef ref;               // in `tier`; ref.count == 0: nowhere
  size_t tier = 0;
  bool found() const { return device >= 0 || load || ref.count > 0; }
  bool in_tier() const { return device < 0 && !load; }
};

// The longest prefix that the device and the lower tiers have together.
struct FetchPlan {
  int64_t tokens = 0;               // length of the prefix; seq.written when there is nothing more
  int64_t loaded = 0;               // of them, not on the device yet
  int64_t first_loaded = 0;         // the first token of those
  int64_t missing = kNoToken;       // index of the page that is nowhere and ends the prefix
  std::vector<PlannedPage> pages;   // in order; only those that a query at `tokens` sees
  std::vector<int64_t> first_held;  // per group
  std::vector<TierLoad> loads;      // per tier
};

// Consecutive pages that the device and the tiers have, after a hole.
struct FoundRange {
  int64_t begin = 0, end = 0;  // page indices; empty: there are no more
  std::vector<TierLoad> loads;
};

// For one plan at a time; engine thread. Lookups use memory only.
class FetchPlanner {
 public:
  // Searches the first `most` of `tiers`.
  FetchPlanner(KvCache& kv, const std::vector<LowerTier*>& tiers, const PendingRemovals& removals,
               const PageLoads& loads, size_t most)
      : kv_(kv), tiers_(tiers.begin(), tiers.begin() + most), removals_(removals), loads_(loads) {}

  // Plans for the first `most` tokens. `exact`: foreign pages count as missing.
  FetchPlan plan(Sequence& seq, int64_t most, bool exact);
  // Returns the next range from page index `page` on, of the groups that need every page. Windows
  // see only pages that have been computed by then.
  FoundRange next_range(Sequence& seq, int64_t page, int64_t most, bool exact);

 private:
  using Found = std::vector<std::vector<PlannedPage>>;  // [group][page - first_]

  int64_t find_full(Sequence& seq, int64_t most, bool exact);  // returns pages searched
  bool find_page(Sequence& seq, int64_t page, bool exact);
  bool add_page(Sequence& seq, int64_t page, bool exact, std::vector<TierLoad>& loads);
  PlannedPage locate(int group, const PageIdentity& identity, bool exact);
  int64_t find_partial(Sequence& seq, int64_t page, int64_t most, bool exact);  // returns tokens
  bool in_reach(int64_t page, int64_t tokens) const;
  void fill_plan(const Sequence& seq, FetchPlan& plan, bool partial);

  KvCache& kv_;
  std::vector<LowerTier*> tiers_;
  const PendingRemovals& removals_;
  const PageLoads& loads_;
  int64_t first_ = 0;                 // first page searched for
  std::vector<int64_t> consecutive_;  // [group] consecutive pages up to the last one found
  int64_t usable_ = 0;                // full pages that a query can use
  Found found_;
  std::vector<PlannedPage> partial_;  // per group
};

}  // namespace turbomind
