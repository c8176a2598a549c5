// Runs planned steps: submits forward and sampling, and commits what came out.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "cache/kv_cache.h"
#include "engine/request_table.h"
#include "engine/scheduler.h"
#include "engine/submitted_step.h"
#include "model/model.h"
#include "sampling/sampler.h"

namespace turbomind {

// Tokens that a device draws at once at most: those of a step, or choices that begin.
constexpr int64_t most_draws(int64_t rows) {
  return std::max<int64_t>(rows, kMaxChoices);
}

// At most two steps are in flight, the second one only where the model is asynchronous. A model
// that is not has computed a step when submit() returns.
class StepRunner {
 public:
  // `stop` ends a step early when the engine shuts down.
  StepRunner(Model& model, KvCache& kv, Scheduler& scheduler, RequestTable& table,
             const std::atomic<bool>& stop);

  // Takes `plan` and leaves another one for use. What goes wrong shows in collect().
  void submit(StepPlan& plan);
  // Waits for the oldest step in flight and commits it. A step that fails ends the requests in it
  // with an error event, and nothing else; the step behind it is as if it had not been run. The
  // plan holds until the next submit().
  const StepPlan& collect();
  int in_flight() const { return in_flight_; }
  // Of the one step in flight, when the next one may be submitted before it is read; or null.
  const StepPlan* to_follow() const;
  // The run's results of steps in flight are dropped.
  void leave(const Run& run);
  // Waits for what is in flight and drops it; every run in it has left or is about to.
  void abandon();

  int64_t tokens_prefilled() const { return tokens_prefilled_; }
  int64_t tokens_decoded() const { return tokens_decoded_; }
  int64_t steps() const { return steps_; }
  int64_t steps_overlapped() const { return steps_overlapped_; }
  double last_step_ms() const { return last_step_ms_; }

 private:
  SubmittedStep& oldest() { return slots_[oldest_]; }
  SubmittedStep& behind() { return slots_[1 - oldest_]; }

  // Submission.
  void build(SubmittedStep& step, const SubmittedStep* before);
  void add_row(SubmittedStep& step, size_t i, const SubmittedStep* before);
  void build_jobs(SubmittedStep& step);
  void add_job(SubmittedStep& step, Run& run, int64_t row, int64_t position);
  void submit_jobs(SubmittedStep& step, size_t first, size_t end);

  // The end.
  void finish(SubmittedStep& step);
  void read_jobs(SubmittedStep& step);
  void read_logprobs(SubmittedStep& step);
  void make_room(size_t rows);
  void fetch_logits(const SubmittedStep& step);
  void commit_kv(const StepPlan& plan);
  void fork_choices(SubmittedStep& step);
  void fork_choices(SubmittedStep& step, Run& first, int64_t row);
  void sample(SubmittedStep& step);
  void commit_token(Run& run, SampleJob& job);
  void commit_logits(const SubmittedStep& step);
  int64_t take_logits(RequestState& state, const float* logits, int64_t begin, int64_t end);
  int64_t take_scores(RequestState& state, const float* logits, int64_t begin, int64_t end);
  void count(const SubmittedStep& step);
  void fail_not_finite(RequestState& state, int64_t position);
  void fail(const StepPlan& plan, ErrorCode code, const char* what);

  Model& model_;
  const bool asynchronous_;
  KvCache& kv_;
  Scheduler& scheduler_;
  RequestTable& table_;
  const std::atomic<bool>& stop_;
  Sampler sampler_;
  const int64_t vocab_;

  std::array<SubmittedStep, 2> slots_;
  int oldest_ = 0;  // of the slots
  int in_flight_ = 0;
  // Of the step being submitted or ended; kept, so that steady decoding allocates nothing.
  StepCancel cancel_;
  std::vector<float> logits_;
  std::vector<int32_t> tokens_;  // that the device has drawn
  std::vector<DeviceLogprob> logprobs_;

  int64_t tokens_prefilled_ = 0;
  int64_t tokens_decoded_ = 0;
  int64_t steps_ = 0;
  int64_t steps_overlapped_ = 0;
  double last_step_ms_ = 0;
  SubmittedStep::Clock::time_point last_end_;
};

}  // namespace turbomind
