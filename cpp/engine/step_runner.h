// Runs a planned step: forward, sample, then commit what came out.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "engine/kv_cache.h"
#include "engine/request_table.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "model/model.h"

namespace turbomind {

class StepRunner {
 public:
  // `stop` ends a step early when the engine shuts down.
  StepRunner(Model& model, KvCache& kv, Scheduler& scheduler, RequestTable& table,
             const std::atomic<bool>& stop);

  // A step that fails ends the requests in it with an error event and nothing else.
  void run(const StepPlan& plan);

  int64_t tokens_prefilled() const { return tokens_prefilled_; }
  int64_t tokens_decoded() const { return tokens_decoded_; }
  int64_t steps() const { return steps_; }
  double last_step_ms() const { return last_step_ms_; }

 private:
  void execute(const StepPlan& plan);
  void build(const StepPlan& plan);
  void make_room(size_t rows);
  void commit_kv(const StepPlan& plan);
  void fetch_logits(const StepPlan& plan);
  void build_jobs(const StepPlan& plan);
  void add_job(Run& run, int64_t row);
  void sample_on_device();
  void fork_choices(Run& first, int64_t row);
  void commit_token(Run& run, SampleJob& job);
  void commit_logits(const StepPlan& plan);
  int64_t take_logits(RequestState& state, const float* logits, int64_t begin, int64_t end);
  int64_t take_scores(RequestState& state, const float* logits, int64_t begin, int64_t end);
  void fail_not_finite(RequestState& state, int64_t position);
  void fail(const StepPlan& plan, ErrorCode code, const char* what);

  Model& model_;
  KvCache& kv_;
  Scheduler& scheduler_;
  RequestTable& table_;
  const std::atomic<bool>& stop_;
  Sampler sampler_;
  const int64_t vocab_;

  // Kept between steps, so that steady decoding allocates nothing.
  StepBatch batch_;
  StepCancel cancel_;
  std::vector<float> logits_;
  std::vector<int64_t> logit_rows_;           // per planned row
  std::vector<DeviceSampleRow> device_rows_;  // of the jobs that a device samples
  std::vector<int32_t> device_tokens_;        // by job
  std::vector<SampleJob> jobs_;
  std::vector<Run*> job_runs_;

  int64_t tokens_prefilled_ = 0;
  int64_t tokens_decoded_ = 0;
  int64_t steps_ = 0;
  double last_step_ms_ = 0;
};

}  // namespace turbomind
