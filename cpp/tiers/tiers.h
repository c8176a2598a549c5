// The lower tiers of the KV cache (host memory, disk) as the engine thread uses them: loading and
// saving pages, removing them, waiting for saves, predictions. Tiers hands each task to one part:
// fetch/ loads, PageSaver saves, PageMover moves bytes on threads of its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "cache/kv_cache.h"
#include "cost/step_time.h"
#include "model/model.h"
#include "tiers/fetch/page_fetcher.h"
#include "tiers/page_mover.h"
#include "tiers/page_saver.h"
#include "tiers/pending_removals.h"
#include "tiers/speed_records.h"
#include "tiers/tier_types.h"

namespace turbomind {

// Used by the engine thread, between steps. Unless noexcept, methods may throw std::bad_alloc and
// can then be called again.
class Tiers {
 public:
  // `tiers`: best first, at least one. `first_speeds`: per tier, assumed until loads were measured.
  // `wake` is called on another thread when collect() has something to do.
  Tiers(KvCache& kv, Model& model, SharedTiers tiers, const std::vector<ReadSpeed>& first_speeds,
        std::function<void()> wake);
  ~Tiers();

  // Loading: see PageFetcher for each of these.
  FetchState* add(const FetchClient& client) { return fetcher_.add(client); }
  void remove(FetchState* state) noexcept { fetcher_.remove(state); }
  FetchResult fetch(FetchState& state, int64_t reusable, const ComputeCost& compute,
                    const std::vector<int64_t>& promised, const std::function<bool()>& make_room) {
    return fetcher_.fetch(state, reusable, compute, promised, make_room);
  }
  void prefetch(Sequence& seq, const ComputeCost& compute, const std::vector<int64_t>& promised) {
    fetcher_.prefetch(seq, compute, promised);
  }
  void cancel(const Sequence& seq) noexcept { fetcher_.cancel(seq); }
  bool fetching() const { return fetcher_.any(); }
  bool fetching(const Sequence& seq) const { return fetcher_.fetching(seq); }
  // Releases device pages that a fetch or a save holds, of one that no request waits for; false:
  // there is none.
  bool release_idle() noexcept { return fetcher_.cancel_idle() || saver_.release_held(); }
  // The same, if need be of a fetch that a request waits for.
  bool release_any() noexcept { return release_idle() || fetcher_.cancel_last(); }

  // Saves pages that were sealed in the last step, if the sequence persists.
  void save_sealed(Sequence& seq);
  // Saves all pages of the sequence that the lowest tier lacks, its unfinished page included.
  void save(Sequence& seq);
  // Copies the sequence's full pages, which the device is about to evict, to host memory if that is
  // a tier. They may be evicted before their turn; a failure is not counted.
  void offload(Sequence& seq);
  // Writes the sequence's retention priority to the tiers.
  void touch(Sequence& seq);
  // Removes pages from all tiers, in the background. From now on they are not loaded.
  void remove(const std::vector<BlockHash>& keys);
  // Finishes `flush` when everything posted so far has been saved or removed, or cannot be.
  void flush(std::shared_ptr<Flush> flush);
  // Writes the speeds measured so far to `records`, in the background.
  void record_speeds(const SpeedRecords& records, const StepTime& time);
  // Touches, in the background, the device memory of as many pages as the tiers have stored.
  void prepare_memory(Model& model);

  // Takes what the mover has done since the last call and posts the next saves.
  void collect();
  // Saves what was posted, for at most `seconds`, then ends the mover and the tiers.
  LastSaves finish(double seconds) noexcept;

  // Returns how many tokens of `seq` the device and the tiers have. `seq` holds no pages.
  Residence residence(Sequence& seq);
  // The same as PageFetcher::predict_ttft().
  double predict_ttft(Sequence& seq, int64_t device, int64_t added, const ComputeCost& compute) {
    return fetcher_.predict_ttft(seq, device, added, compute);
  }
  const FetchCost& cost() const { return fetcher_.cost(); }

  size_t count() const { return mover_.tiers().size(); }
  std::vector<TierStats> stats() const;  // [tier]
  int64_t pages_loaded() const { return fetcher_.loaded(); }
  int64_t pages_saved() const { return saver_.saved(); }
  int64_t failed_loads() const { return fetcher_.failed(); }  // pages
  int64_t failed_saves() const { return saver_.failed(); }    // pages
  // Returns the device pages that fetches and saves hold, for check_invariants().
  std::vector<HeldPage> held() const;

 private:
  struct PendingFlush {
    uint64_t number;  // of the save that was posted last
    std::shared_ptr<Flush> flush;
    std::shared_ptr<PageMove> mark;  // posted after the saves that the flush waits for
  };

  std::shared_ptr<PageMove> post_task(std::function<void(LowerTier&)> task);
  void take_done() noexcept;
  void finish_flushes(const PageMove& mark) noexcept;
  void mark_flushes();

  KvCache& kv_;
  PageMover mover_;
  PendingRemovals removals_;
  PageSaver saver_;
  PageFetcher fetcher_;
  std::list<PendingFlush> flushes_;
  std::atomic<bool> stop_preparing_{false};
  std::thread preparing_;
};

}  // namespace turbomind
