// Runs planned steps: builds the model's batch, submits forward and sampling, and commits KV,
// tokens and logits. What a step contains is decided by the Scheduler.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "cache/kv_cache.h"
#include "engine/request_table.h"
#include "engine/step/scheduler.h"
#include "engine/step/submitted_step.h"
#include "model/model.h"
#include "sampling/sampler.h"

namespace turbomind {

// Returns the most tokens that a device samples at once: one per slot, or all choices of a request
// when they begin.
constexpr int64_t most_samples(int64_t slots) {
  return std::max<int64_t>(slots, kMaxChoices);
}

// Used by the engine thread. At most two steps are in flight, the second one only where the model
// is asynchronous. Another model has computed a step when submit() returns.
class StepRunner {
 public:
  // `stop` ends a step early when the engine shuts down.
  StepRunner(Model& model, KvCache& kv, Scheduler& scheduler, RequestTable& table,
             const std::atomic<bool>& stop);

  // Submits the step and swaps an unused plan into `plan`. Errors are reported by collect().
  void submit(StepPlan& plan);
  // Waits for the oldest step in flight, commits it and returns its plan, which is valid until the
  // next submit(). A step that fails ends the requests in it with an error event and no others; a
  // step that follows it in flight counts as not run.
  const StepPlan& collect();
  int in_flight() const { return in_flight_; }
  // Returns the plan of the only step in flight if the next step may be submitted before this one
  // is read, else null. The environment may forbid it (cuda/gpu_switches.h).
  const StepPlan* to_follow() const;
  // Drops the sequence's results of steps in flight.
  void leave(const SequenceState& sequence);
  // Waits for steps in flight and drops them. Every sequence in them has left or is about to.
  void abandon();

  int64_t tokens_prefilled() const { return tokens_prefilled_; }
  int64_t tokens_decoded() const { return tokens_decoded_; }
  // Returns the tokens computed again since their sequence had lost their KV.
  int64_t tokens_recomputed() const { return tokens_recomputed_; }
  int64_t steps() const { return steps_; }
  int64_t steps_overlapped() const { return steps_overlapped_; }
  double last_step_ms() const { return last_step_ms_; }

 private:
  SubmittedStep& oldest() { return in_turn_[oldest_]; }
  SubmittedStep& youngest() { return in_turn_[1 - oldest_]; }

  // Submission.
  void build(SubmittedStep& step, const SubmittedStep* before);
  void add_sequence(SubmittedStep& step, size_t i, const SubmittedStep* before);
  void build_jobs(SubmittedStep& step);
  void add_job(SubmittedStep& step, SequenceState& sequence, int64_t row, int64_t position);
  void submit_jobs(SubmittedStep& step, size_t first, size_t end);

  // Collection.
  void finish(SubmittedStep& step);
  void read_jobs(SubmittedStep& step);
  void read_logprobs(SubmittedStep& step);
  void grow_logits(size_t rows);
  void read_logits(const SubmittedStep& step);
  void commit_kv(const StepPlan& plan);
  void fork_choices(SubmittedStep& step);
  void fork_choices(SubmittedStep& step, SequenceState& first, int64_t row);
  void sample(SubmittedStep& step);
  void commit_token(SequenceState& sequence, SampleJob& job);
  void commit_logits(const SubmittedStep& step);
  int64_t take_logits(RequestState& state, const float* logits, int64_t begin, int64_t end);
  int64_t take_scores(RequestState& state, const float* logits, int64_t begin, int64_t end);
  void count(const SubmittedStep& step);
  void fail_not_finite(RequestState& state, int64_t position);
  void fail(const StepPlan& plan, ErrorCode code, const char* what);

  Model& model_;
  const bool asynchronous_;
  const bool overlaps_;  // a step may be submitted while another one is in flight
  KvCache& kv_;
  Scheduler& scheduler_;
  RequestTable& table_;
  const std::atomic<bool>& stop_;
  Sampler sampler_;
  const int64_t vocab_;

  std::array<SubmittedStep, 2> in_turn_;
  int oldest_ = 0;  // index in in_turn_
  int in_flight_ = 0;
  // Buffers of the step being submitted or collected, reused, so that steady decoding allocates
  // nothing.
  StepCancel cancel_;
  std::vector<float> logits_;
  std::vector<int32_t> tokens_;  // sampled by the device
  std::vector<Logprob> logprobs_;

  int64_t tokens_prefilled_ = 0;
  int64_t tokens_decoded_ = 0;
  int64_t tokens_recomputed_ = 0;
  int64_t steps_ = 0;
  int64_t steps_overlapped_ = 0;
  double last_step_ms_ = 0;
  SubmittedStep::Clock::time_point last_end_;
};

}  // namespace turbomind
