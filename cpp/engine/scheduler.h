// Which runs take part in the next step, with how many tokens, on which pages.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "cache/kv_cache.h"
#include "cost/step_time.h"
#include "engine/options.h"
#include "engine/request_state.h"
#include "tiers/tiers.h"

namespace turbomind {

constexpr int kDefaultPrefillChunk = 512;  // tokens
constexpr int64_t kMostLogitRows = 128;    // of score and logits requests; bounds a step's logits

struct PlannedRow {
  Run* run = nullptr;
  int64_t tokens = 0;
  int64_t begin = 0;    // index of the first of them in the sequence
  int64_t pending = 0;  // tokens from there on that a step could compute; 1: it decodes
  // Its row in the step before, which draws the token that this one computes; -1: all are known.
  int after = -1;
};

struct StepPlan {
  std::vector<PlannedRow> rows;  // decode rows first
  StepCost cost;
  bool representative = true;  // of the time other steps of this cost take
};

// Who may take part in a step. Only prompts listen to cancels: where none takes part nothing ends
// the step, and where the first in rank is the only one nobody else's cancel does.
enum class StepFor : uint8_t { all, decoding, first_prompt };

class Scheduler {
 public:
  // `park_idle` drops the pages of the idle handle that is worth least; false when none has any.
  // `tiers`: below the device; null: there are none. `asynchronous`: two steps may be under way.
  Scheduler(KvCache& kv, const EngineOptions& options, std::function<bool()> park_idle,
            Tiers* tiers = nullptr, bool asynchronous = false);

  void add(Run* run) {
    waiting_.insert(run);
    news_ = true;
  }
  void remove(Run* run);

  // Gives waiting runs a row while there are rows and pages, then chooses the step's rows and takes
  // their pages. The first run in rank always gets what it needs, so no plan is empty while a run
  // exists; but for those that are set aside until their pages have come up from a lower tier.
  void plan(StepPlan& plan);
  // The step that comes after `before`, which was submitted and not read: runs that have a row go
  // on, but for those that end with it, and prompts share its time as in plan(). False when there
  // is no such step, or when a plan() may do more: somebody was cancelled or waits and may be
  // served now, choices begin, pages of a tier may be taken over or would have to be reclaimed.
  // `before` may have rows whose run has left, null.
  bool plan_ahead(const StepPlan& before, StepPlan& plan);
  void observe(const StepPlan& plan, double ms);
  // A cancel ended the step. Those that follow are not for everybody, or a storm of cancels would
  // keep the others from getting on.
  void abandoned() { step_for_ = StepFor::decoding; }

  const std::vector<Run*>& rows() const { return rows_; }  // [max_batch_size], null: unused
  int64_t rows_in_use() const;
  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t preemptions() const { return preemptions_; }
  int64_t tokens_reused() const { return tokens_reused_; }
  int64_t tokens_loaded() const { return tokens_loaded_; }
  void add_promised(std::vector<int64_t>& promised) const;  // what runs with a row still need
  const StepTime& step_time() const { return step_time_; }
  bool begin_with(const StepTime::Fit& fit) { return step_time_.begin_with(fit); }
  int64_t prefill_chunk() const { return prefill_chunk_; }

 private:
  void admit();
  Run* first_ready() const;
  bool set_aside(Run& run);
  void cross_gaps();
  void count_crossed(Run& run);
  void seat(Run* run);
  Run* outranked_by(const Run& run) const;
  bool make_room(const Run& run);
  void fill(StepPlan& plan);
  void add_rows(StepPlan& plan) const;
  bool look_ahead(const StepPlan& before);
  bool follow(Run& run, const StepPlan& before, int place);
  bool acquire_ahead();
  bool reclaim(const Run& beneficiary);
  bool reclaim_idle(const Run& beneficiary);
  void preempt(Run* run);
  void give_up_row(Run* run);
  void choose_lengths();
  void choose_decoding();
  void choose_prompts();
  PlannedRow* longest_waiting();
  void add_chunk(PlannedRow& row, int64_t tokens);
  int64_t most_of(const PlannedRow& row) const;
  int64_t chunk_of(const PlannedRow& row, int64_t least) const;
  int64_t acquire(Run& run, int64_t tokens);

  KvCache& kv_;
  const int64_t prefill_chunk_;
  const double step_ms_;
  const double alone_ms_;  // of a step that gives nobody a token
  const std::function<bool()> park_idle_;
  Tiers* const tiers_;
  std::vector<Run*> rows_;
  std::set<Run*, ByRank> waiting_;
  StepTime step_time_;
  int64_t preemptions_ = 0;
  int64_t tokens_reused_ = 0;
  int64_t tokens_loaded_ = 0;
  StepFor step_for_ = StepFor::all;
  bool news_ = false;         // since the last plan(): whoever waits may have its turn
  int steps_overlapped_ = 0;  // since then

  // Of the step being planned.
  std::vector<PlannedRow> candidates_;  // in rank order
  StepCost cost_;
  int64_t decode_rows_ = 0;
  bool answers_ = false;  // a sequence gets a token at the step's end, which somebody waits for
  int64_t logit_rows_ = 0;
  std::vector<int64_t> promised_;  // per cache group: pages that admitted runs still need
  std::vector<int64_t> taken_;     // per cache group: pages of the step planned ahead
  std::vector<int> places_;        // per row in use: its place in the step before
};

}  // namespace turbomind
