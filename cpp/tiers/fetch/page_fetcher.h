// Brings a sequence's pages up from the tiers below, while the engine goes on.
#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "cache/kv_cache.h"
#include "engine/request_state.h"
#include "tiers/fetch/fetch_plan.h"
#include "tiers/page_mover.h"

namespace turbomind {

// Used by the engine thread. A sequence has one fetch at a time. Fetches that want the same page
// share its load. Each holds all pages of the beginning it fetches; when the last one is there they
// become the sequence's.
class PageFetcher {
 public:
  using Clock = std::chrono::steady_clock;

  PageFetcher(KvCache& kv, const Model& model, PageMover& mover)
      : kv_(kv), model_(model), mover_(mover) {}

  // What is known of pages that may come at any time.
  PageLoads& loads() { return loads_; }
  // Whether the pages can be had: pages that are free or cached, `promised` per group left aside.
  bool has_room(const FetchPlan& plan, const std::vector<int64_t>& promised) const;
  // Only with room. `run` is what waits for it, if anything does. It is cancelled at `deadline`.
  void begin(Sequence& seq, Run* run, const FetchPlan& plan, bool exact,
             Clock::time_point deadline);
  bool active(const Sequence& seq) const;
  void wait_for(const Sequence& seq, Run& run);  // the run waits for what was begun before it came
  void cancel(const Sequence& seq) noexcept;     // if it has one
  void forget(const PendingRemovals& removals) noexcept;  // fetches of pages that are to be removed
  void cancel_late(Clock::time_point now) noexcept;
  bool cancel_idle() noexcept;           // one that no run waits for; false: there is none
  bool cancel_last() noexcept;           // the one whose run ranks last; false: there is none
  void finish(PageMove& move) noexcept;  // one that the mover is done with

  bool any() const { return !fetches_.empty(); }
  void add_loads(std::vector<TierLoad>& loads) const;  // on their way, per tier as planned
  int64_t loaded() const { return loaded_; }
  int64_t failed() const { return failed_; }
  void add_held(std::vector<HeldPage>& held) const;

 private:
  static constexpr int kMostFailures = 8;  // of a run's loads; then it computes
  struct Slot {
    int group;
    int64_t index;
    PageLoad* load;  // null: it is there
  };
  struct Fetch {
    Sequence* seq = nullptr;
    Run* run = nullptr;
    PageTables tables;
    std::vector<Slot> slots;
    std::vector<int32_t> tokens;  // behind the last full page
    BlockHash parent;             // of that
    int64_t length = 0;           // tokens
    int64_t loaded = 0, first_loaded = 0;
    int open = 0;
    Clock::time_point deadline;
  };
  using Fetches = std::list<Fetch>;

  void describe(Fetch& fetch, const Sequence& seq, const FetchPlan& plan) const;
  PageLoad make_load(const Sequence& seq, const PlannedPage& page, const FetchPlan& plan,
                     bool exact) const;
  static void plan_anew(Run& run) noexcept;
  void fill(PageLoad& load, int32_t page) noexcept;
  void complete(Fetches::iterator fetch);
  bool fits(const Fetch& fetch) const;
  void drop(Fetches::iterator fetch) noexcept;
  void drop_load(PageLoad* load) noexcept;
  Fetches::iterator find(const Sequence& seq);

  KvCache& kv_;
  const Model& model_;
  PageMover& mover_;
  Fetches fetches_;
  PageLoads loads_;
  int64_t loaded_ = 0, failed_ = 0;  // pages
};

}  // namespace turbomind
