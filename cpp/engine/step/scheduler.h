// Plans steps (continuous batching with chunked prefill): which sequences take part in the next
// step, with how many tokens, on which pages. It admits waiting sequences to slots, preempts under
// memory pressure and cuts prompts to a target step time. It runs nothing: see step_runner.h.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "cache/kv_cache.h"
#include "cost/step_time.h"
#include "engine/engine_options.h"
#include "engine/request_state.h"
#include "tiers/tiers.h"

namespace turbomind {

constexpr int kDefaultPrefillChunk = 512;  // tokens
constexpr int64_t kMostLogitRows = 128;    // of score and logits requests; bounds a step's logits

// A sequence's part of a step.
struct PlannedSequence {
  SequenceState* sequence = nullptr;  // null: it has left since
  int64_t tokens = 0;
  int64_t begin = 0;    // index of the first of them in the sequence
  int64_t pending = 0;  // tokens from there on that a step could compute; 1: it decodes
  // Its index in the previous step, which samples the token that this one computes; -1: all tokens
  // are known.
  int after = -1;
};

struct StepPlan {
  std::vector<PlannedSequence> sequences;  // decoding ones first
  StepCost cost;
  bool representative = true;  // other steps of this cost take about as long
};

// Sequences that may take part in a step. A step can be cancelled only by requests whose prompts it
// prefills: a step of decoding sequences never is, and one of the first prompt only by that
// request.
enum class StepFor : uint8_t { all, decoding, first_prompt };

// Used by the engine thread.
class Scheduler {
 public:
  // `park_idle` drops the pages of the idle handle of least retention priority and returns false
  // when no idle handle holds any. `tiers`: the lower tiers; null: there are none. `asynchronous`:
  // two steps may be in flight.
  Scheduler(KvCache& kv, const EngineOptions& options, std::function<bool()> park_idle,
            Tiers* tiers = nullptr, bool asynchronous = false);

  // Adds a sequence that waits for a slot. Throws std::bad_alloc with nothing added.
  void add(SequenceState* sequence);
  // Removes a sequence, with or without a slot, and cancels what is fetched for it. A sequence that
  // was not added is ignored.
  void remove(SequenceState* sequence) noexcept;

  // Takes over the priority that the submitter of the request has set. Sequences keep their slots
  // until the next plan(). Throws std::bad_alloc with nothing changed.
  void reprioritize(RequestState& request);

  // Gives slots to waiting sequences while there are slots and pages, then chooses the step's
  // sequences and takes their pages. The first in rank always gets what it needs, so the plan is
  // empty only when every sequence waits for pages of a lower tier. Throws Error(internal) should
  // that not hold, and std::bad_alloc.
  void plan(StepPlan& plan);
  // Plans the step that follows `before`, which is in flight (asynchronous scheduling). Sequences
  // with a slot continue unless they end with `before`; prompts share the time as in plan().
  // `before` may have sequences that have left, null. Returns false when there is no such step, or
  // when plan() may do better once `before` has ended: a request was cancelled, a sequence waits
  // and may get a slot, choices fork, or pages would have to be loaded or reclaimed.
  bool plan_next(const StepPlan& before, StepPlan& plan);
  // Records that a step of this plan took `ms`.
  void observe(const StepPlan& plan, double ms);
  // Reports that a cancel ended the step. The steps that follow are for fewer sequences, so that
  // many cancels in a row cannot starve the others.
  void abandoned() { step_for_ = StepFor::decoding; }

  int64_t slots() const { return static_cast<int64_t>(slots_.size()); }  // max_batch_size
  int64_t slots_in_use() const;
  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t preemptions() const { return preemptions_; }
  int64_t tokens_reused() const { return tokens_reused_; }
  int64_t tokens_loaded() const { return tokens_loaded_; }
  // Returns the prompt tokens of requests that have had a slot.
  int64_t prompt_tokens() const { return prompt_tokens_; }
  int64_t requests_started() const { return requests_started_; }
  // Returns how long these requests waited for their first slot, in seconds in all.
  double queue_seconds() const { return queue_seconds_; }
  // Returns how many requests waited for a prefix that another sequence was computing.
  int64_t prefixes_awaited() const { return prefixes_awaited_; }
  // Adds, per cache group, the pages that sequences with a slot still need.
  void add_promised(std::vector<int64_t>& promised) const;
  const StepTime& step_time() const { return step_time_; }
  bool begin_with(const StepTime::Fit& fit) { return step_time_.begin_with(fit); }
  void trust(int64_t tokens) { step_time_.trust(tokens); }
  int64_t prefill_chunk() const { return prefill_chunk_; }  // tokens
  ComputeCost compute_cost() const { return {step_time_, prefill_chunk_}; }

 private:
  // A prompt among the candidates.
  struct Prompt {
    PlannedSequence* planned = nullptr;
    int64_t goal = 0;      // tokens until it is complete or another sequence can share it
    int64_t reserved = 0;  // tokens in the step's cost in advance
  };

  void observe_length(const SequenceState& sequence);
  void admit();
  void resume(SequenceState& sequence);
  bool ready(const SequenceState& sequence) const;
  SequenceState* next_ready();
  int64_t cached_pages(SequenceState& sequence, int64_t most);
  void count_passed(const SequenceState& sequence);
  const SequenceState* leader_of(const SequenceState& sequence) const;
  bool find_leader(SequenceState& sequence);
  int64_t shared_tokens(const SequenceState& sequence, const SequenceState& other) const;
  void share(SequenceState& sequence, const SequenceState& other);
  void hand_over(const SequenceState& leader) noexcept;
  void find_awaited();
  bool completes_awaited(const StepPlan& before) const;
  bool set_aside(SequenceState& sequence);
  void cross_holes();
  void count_crossed(SequenceState& sequence);
  void take_slot(SequenceState* sequence);
  void count_start(const RequestState& request);
  SequenceState* outranked_by(const SequenceState& sequence) const;
  bool make_room(const SequenceState& sequence);
  bool make_growth_room(const SequenceState& sequence);
  void fill(StepPlan& plan);
  void add_sequences(StepPlan& plan) const;
  bool find_next_candidates(const StepPlan& before);
  bool follow(SequenceState& sequence, const StepPlan& before, int place);
  bool acquire_next();
  bool reclaim(const SequenceState& beneficiary);
  bool reclaim_idle(const SequenceState& beneficiary);
  void preempt(SequenceState* sequence);
  void release_slot(SequenceState* sequence);
  void drop_pages(SequenceState& sequence);
  void choose_lengths();
  size_t first_taking_part() const;
  double predicted_ms(size_t count) const;
  void choose_decoding();
  void choose_prompts();
  void choose_equals(size_t begin, size_t end);
  int64_t half_step(const PlannedSequence& planned, int64_t shortest) const;
  int64_t goal_of(const PlannedSequence& planned) const;
  void reserve(Prompt& prompt, int64_t tokens, int64_t most);
  Prompt& longest_waiting();
  void add_chunk(PlannedSequence& planned, int64_t tokens);
  int64_t most_of(const PlannedSequence& planned) const;
  int64_t chunk_of(const PlannedSequence& planned, int64_t least) const;
  double budget_ms() const;
  int64_t acquire(SequenceState& sequence, int64_t tokens);

  KvCache& kv_;
  const int64_t prefill_chunk_;
  const double step_ms_;
  const double alone_ms_;  // of a step after which no sequence gets a token
  const double lone_ms_;   // the same, of a prompt beside which no other sequence is
  const std::function<bool()> park_idle_;
  Tiers* const tiers_;
  std::vector<SequenceState*> slots_;  // null: unused
  std::set<SequenceState*, ByRank> waiting_;
  StepTime step_time_;
  int64_t preemptions_ = 0;
  int64_t tokens_reused_ = 0;
  int64_t tokens_loaded_ = 0;
  int64_t prompt_tokens_ = 0;
  int64_t requests_started_ = 0;
  int64_t prefixes_awaited_ = 0;
  double queue_seconds_ = 0;
  double expected_growth_ = 512;  // tokens that a sequence generates, on average
  StepFor step_for_ = StepFor::all;
  bool changed_ = false;      // since the last plan(): a waiting sequence may be served now
  int steps_overlapped_ = 0;  // since the last plan()
  bool left_out_ = false;     // the last step left sequences out, see first_taking_part()

  // State of the step being planned.
  std::vector<PlannedSequence> candidates_;  // in rank order
  size_t taking_part_ = 0;                   // the first ones that may take part
  std::vector<Prompt> prompts_;              // those with more than one token to compute
  StepCost cost_;
  int64_t decoding_ = 0;  // sequences that decode
  bool answers_ = false;  // a sequence gets a token at the step's end
  int64_t logit_rows_ = 0;
  std::vector<int64_t> promised_;  // per cache group: pages that sequences with a slot still need
  std::vector<int64_t> taken_;     // per cache group: pages of the step that plan_next() plans
  std::vector<int> places_;        // [slot] index in the previous step
  // [slot] The first token up to which a waiting sequence needs what is computed there; kNoToken:
  // none waits.
  std::vector<int64_t> awaited_;
};

}  // namespace turbomind
