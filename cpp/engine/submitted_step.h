// A step from its submission to its end.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <vector>

#include "engine/scheduler.h"
#include "model/model.h"
#include "sampling/sampler.h"

namespace turbomind {

// Kept and used again, so that steady decoding allocates nothing.
struct SubmittedStep {
  using Clock = std::chrono::steady_clock;

  StepPlan plan;  // runs that have left since are null
  StepBatch batch;
  std::vector<int64_t> logit_rows;  // per planned row
  std::vector<SampleJob> jobs;
  std::vector<Run*> job_runs;  // null as in the plan
  // Of the jobs that the device does, and which they are.
  std::vector<DeviceSampleRow> device_rows;
  std::vector<int32_t> device_jobs;
  std::vector<DeviceLogprobRow> logprob_rows;  // of those whose log-probabilities are wanted
  std::vector<int32_t> drawn;  // per planned row: the one of them that is its, or -1

  bool ahead = false;          // submitted before the step before it was read
  bool needs_host = false;     // some of its logits, which the model keeps until the next step
  bool abandoned = false;      // a cancel ended it: it is as if it had not been run
  std::exception_ptr failure;  // of the submission
  Clock::time_point start;

  void begin(bool before_read) {
    jobs.clear();
    job_runs.clear();
    ahead = before_read;
    abandoned = false;
    failure = nullptr;
    start = Clock::now();
  }

  void forget(const Run& run) {
    for (PlannedRow& row : plan.rows)
      if (row.run == &run) row.run = nullptr;
    for (Run*& r : job_runs)
      if (r == &run) r = nullptr;
  }
};

}  // namespace turbomind
