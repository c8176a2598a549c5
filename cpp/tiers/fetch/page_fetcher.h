// Loads a sequence's pages from lower tiers while the engine goes on. It decides whether loading is
// worth it, takes device pages, posts the loads and installs the pages when they have come.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <vector>

#include "cache/kv_cache.h"
#include "tiers/fetch/fetch_cost.h"
#include "tiers/fetch/fetch_plan.h"
#include "tiers/fetch/fetch_state.h"
#include "tiers/fetch/page_loads.h"
#include "tiers/page_mover.h"
#include "tiers/pending_removals.h"

namespace turbomind {

// Answer to PageFetcher::fetch().
enum class FetchResult : uint8_t {
  none,     // nothing is worth loading: compute
  waiting,  // pages are being loaded: set the sequence aside until FetchState::fetching() is false
  no_room,  // pages are worth loading, but too few device pages are available
};

// The fetch of a prefix.
struct PageFetch {
  struct Place {
    int group;
    int64_t index;   // of the page in the sequence
    PageLoad* load;  // null: the page has been loaded
  };
  Sequence* seq = nullptr;
  FetchState* waiter = nullptr;  // null: no request waits for it
  PageTables tables;
  std::vector<Place> places;
  std::vector<int32_t> tokens;  // after the last full page
  BlockHash parent;             // of that page
  int64_t length = 0;           // tokens
  int64_t loaded = 0, first_loaded = 0;
  size_t open = 0;  // places that wait for a load
  std::chrono::steady_clock::time_point deadline;
  std::list<PageFetch>::iterator self;
};

// Used by the engine thread. A sequence has one fetch at a time. Fetches that need the same page
// share its load. A fetch holds a reference to every page of the prefix it fetches; when the last
// one has been loaded all of them become the sequence's.
class PageFetcher {
 public:
  using Clock = std::chrono::steady_clock;

  PageFetcher(KvCache& kv, const Model& model, PageMover& mover, const PendingRemovals& removals,
              const std::vector<ReadSpeed>& first_speeds);

  // Begins and ends the record of a sequence that may fetch. remove() cancels a fetch that the
  // sequence waits for.
  FetchState* add(const FetchClient& client);
  void remove(FetchState* state) noexcept;

  // For a sequence that is next to get a slot: looks for the longest prefix of its first `reusable`
  // tokens in the tiers and begins to load it if that is worth it and there is room. `promised`:
  // device pages per group that running sequences still need, which are left free. `make_room`
  // releases pages of others and brings `promised` up to date; it returns false when there is
  // nothing to release. Where a page is missing it sets FetchState::hole_end(). Throws
  // std::bad_alloc with nothing begun.
  FetchResult fetch(FetchState& state, int64_t reusable, const ComputeCost& compute,
                    const std::vector<int64_t>& promised, const std::function<bool()>& make_room);
  // The same for an idle sequence that no request runs; does nothing without room.
  void prefetch(Sequence& seq, const ComputeCost& compute, const std::vector<int64_t>& promised);

  // Each of these cancels fetches. A sequence that waited for one goes on without it.
  void cancel(const Sequence& seq) noexcept;              // the sequence's, if it has one
  void forget(const PendingRemovals& removals) noexcept;  // those with a page that is removed
  void cancel_late() noexcept;                            // those past their deadline
  bool cancel_idle() noexcept;  // one that no request waits for; false: there is none
  bool cancel_last() noexcept;  // an idle one, else that of the last in rank; false: there is none

  // Takes the result of a load that the mover is done with.
  void finish(PageMove& move) noexcept;

  // Returns the length of the longest prefix of `seq` that the device and the first `tiers` tiers
  // have, in tokens.
  int64_t longest_prefix(Sequence& seq, size_t tiers);
  // Returns seconds until the first token of a turn that appends `added` tokens to `seq`, of which
  // the device has the first `device` tokens.
  double predict_ttft(Sequence& seq, int64_t device, int64_t added, const ComputeCost& compute);

  bool any() const { return !fetches_.empty(); }
  bool fetching(const Sequence& seq) const;
  const FetchCost& cost() const { return cost_; }
  int64_t loaded() const { return loaded_; }  // pages
  int64_t failed() const { return failed_; }  // pages
  // Adds the pages that fetches hold, for check_invariants().
  void add_held(std::vector<HeldPage>& held) const;

 private:
  static constexpr int kMostFailures = 8;  // loads of a sequence; then it computes
  using Fetch = PageFetch;
  using Fetches = std::list<Fetch>;

  FetchPlanner planner(size_t tiers);
  FetchPlan plan(Sequence& seq, int64_t most, bool exact);
  bool worth(const FetchPlan& plan, int64_t from, const ComputeCost& compute) const;
  int64_t find_hole_end(Sequence& seq, int64_t missing, int64_t most, bool exact,
                        const ComputeCost& compute);
  bool has_room(const FetchPlan& plan, const std::vector<int64_t>& promised) const;
  void begin(Sequence& seq, FetchState* waiter, const FetchPlan& plan, bool exact,
             double compute_seconds);
  void describe(Fetch& fetch, const Sequence& seq, const FetchPlan& plan) const;
  PageLoad make_load(const Sequence& seq, const PlannedPage& page, const FetchPlan& plan,
                     bool exact) const;
  static void plan_again(FetchState& state) noexcept;
  void fill(PageLoad& load, int32_t page) noexcept;
  void complete(Fetches::iterator fetch);
  bool fits(const Fetch& fetch) const;
  void drop(Fetches::iterator fetch) noexcept;
  void drop_load(PageLoad& load) noexcept;
  Fetches::iterator find(const Sequence& seq);
  template <typename F>
  void drop_if(F&& condition) noexcept;

  KvCache& kv_;
  const Model& model_;
  PageMover& mover_;
  const PendingRemovals& removals_;
  FetchCost cost_;
  std::list<FetchState> states_;
  Fetches fetches_;
  PageLoads loads_;
  int64_t loaded_ = 0, failed_ = 0;
  uint64_t drops_ = 0;  // of fetches
};

}  // namespace turbomind
