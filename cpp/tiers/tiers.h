// The tiers of pages below the device, as the engine thread sees them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/options.h"
#include "tiers/fetch/fetch_cost.h"
#include "tiers/fetch/page_fetcher.h"
#include "tiers/page_mover.h"
#include "tiers/page_saver.h"
#include "tiers/pending_removals.h"
#include "tiers/speed_records.h"
#include "tiers/tier_types.h"

namespace turbomind {

// Those that the options ask for. Throws Error(invalid_request) for options that do not go
// together, and what the tiers throw.
TierPtrs make_tiers(const EngineOptions& options, const Model& model);
// What to believe of their speeds at first. Measures the page folder's, for a quarter of a second;
// what was `noted` of it counts unless it seems much faster now.
std::vector<ReadSpeed> first_speeds(const EngineOptions& options, const Model& model, size_t tiers,
                                    const std::optional<SpeedRecord>& noted);

class Tiers {
 public:
  // `wake` is called by another thread when there is something to collect().
  Tiers(KvCache& kv, Model& model, SharedTiers tiers, const std::vector<ReadSpeed>& first_speeds,
        std::function<void()> wake);
  ~Tiers();

  // For a run that is first in line: true when its pages are on their way, and it is to be set
  // aside. Where a page is missing it says where the run is to ask again. `promised()` are pages
  // that others still need, `make_room()` gives up some that nobody uses just now.
  template <typename Promised, typename MakeRoom>
  bool fetch(Run& run, const StepTime& time, int64_t chunk, Promised&& promised,
             MakeRoom&& make_room);
  // Brings up what there is of an idle sequence, if there is room.
  void warm(Sequence& seq, const StepTime& time, int64_t chunk,
            const std::vector<int64_t>& promised);
  void cancel(const Sequence& seq) noexcept { fetcher_.cancel(seq); }  // what it fetches
  bool fetching() const { return fetcher_.any(); }
  // Pages held for what nobody waits for; for anything. False: there are none.
  bool give_up_idle() noexcept { return fetcher_.cancel_idle() || saver_.give_up(); }
  bool give_up_any() noexcept { return give_up_idle() || fetcher_.cancel_last(); }

  void sealed(Sequence& seq);  // after a step; for one that persists
  void save(Sequence& seq);    // all of it
  void touch(Sequence& seq);   // its retention priority goes down
  void remove(const std::vector<BlockHash>& keys);
  void flush(std::shared_ptr<Flush> flush);
  // In the background: what was measured, for later engines on the folder.
  void record_speeds(const SpeedRecords& notes, const StepTime& time);
  // In the background: memory for what is stored, as far as there are pages on the device for it.
  void prepare_memory(Model& model);

  // What the mover has done since the last call, and the next saves. Throws for lack of memory;
  // the next call goes on.
  void collect();
  // Saves what was posted, for at most `seconds`, and ends the mover and the tiers.
  LastSaves finish(double seconds) noexcept;

  Residence residence(Sequence& seq);
  // Seconds until the first token of a turn of `added` tokens behind those of `seq`, the first
  // `device` of which are on the device. `seq` holds no pages.
  double predict_ttft(Sequence& seq, int64_t device, int64_t added, const StepTime& time,
                      int64_t chunk);
  const FetchCost& cost() const { return cost_; }

  size_t count() const { return mover_.tiers().size(); }
  std::vector<TierStats> stats() const;
  int64_t pages_loaded() const { return fetcher_.loaded(); }
  int64_t pages_saved() const { return saver_.saved(); }
  int64_t failed_loads() const { return fetcher_.failed(); }
  int64_t failed_saves() const { return saver_.failed(); }
  std::vector<HeldPage> held() const;

 private:
  struct Waiting {
    uint64_t number;  // of what was posted last
    std::shared_ptr<Flush> flush;
    std::shared_ptr<PageMove> mark;  // behind what it waits for
  };

  FetchPlanner planner(size_t tiers);  // that looks at the first ones alone
  FetchPlan plan(Sequence& seq, int64_t most, bool exact);
  int64_t find_gap_end(Sequence& seq, int64_t missing, int64_t most, bool exact,
                       const StepTime& time, int64_t chunk);
  bool worth(const FetchPlan& plan, int64_t from, const StepTime& time, int64_t chunk) const;
  void begin(Sequence& seq, Run* run, const FetchPlan& plan, bool exact, double compute_seconds);
  std::shared_ptr<PageMove> post_task(std::function<void(LowerTier&)> task);
  void take_done() noexcept;
  void finish_flushes(const PageMove& mark) noexcept;
  void mark_flushes();

  KvCache& kv_;
  FetchCost cost_;
  PageMover mover_;
  PendingRemovals removals_;
  PageSaver saver_;
  PageFetcher fetcher_;
  std::list<Waiting> flushes_;
  std::atomic<bool> stop_preparing_{false};
  std::thread preparing_;
};

template <typename Promised, typename MakeRoom>
bool Tiers::fetch(Run& run, const StepTime& time, int64_t chunk, Promised&& promised,
                  MakeRoom&& make_room) {
  Sequence& seq = *run.seq;
  if (fetcher_.active(seq)) {
    fetcher_.wait_for(seq, run);
    return true;
  }
  const bool exact = run.request->options.exact;
  const int64_t most = run.request->reusable(run);
  while (!run.fetch_tried) {
    const FetchPlan next = plan(seq, most, exact);
    if (run.gap_end == Run::kUnknown && run.request->generates())
      run.gap_end = find_gap_end(seq, next.missing, most, exact, time, chunk);
    if (!worth(next, seq.written, time, chunk)) return false;
    if (fetcher_.has_room(next, promised())) {
      begin(seq, &run, next, exact, compute_range(time, chunk, seq.written, next.tokens));
      run.fetch_tried = true;
      return true;
    }
    if (!make_room()) return false;
  }
  return false;
}

}  // namespace turbomind
