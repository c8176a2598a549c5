// A step from its submission until its results are committed: the plan, the model's batch and the
// sampling jobs.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <vector>

#include "engine/step/scheduler.h"
#include "model/model.h"
#include "sampling/sampler.h"

namespace turbomind {

// Reused for later steps, so that steady decoding allocates nothing.
struct SubmittedStep {
  using Clock = std::chrono::steady_clock;

  StepPlan plan;  // sequences that have left since are null
  StepBatch batch;
  std::vector<int64_t> logit_rows;  // per planned sequence: rows of logits that it needs
  std::vector<SampleJob> jobs;
  std::vector<SequenceState*> job_sequences;  // [job]; null as in the plan
  // Jobs that the device does, and their indices in `jobs`.
  std::vector<SampleRow> device_rows;
  std::vector<int32_t> device_jobs;
  std::vector<LogprobRow> logprob_rows;  // jobs whose log-probabilities are wanted
  std::vector<int32_t> device_index;     // per planned sequence: in device_rows, or -1

  bool overlapped = false;     // submitted before the previous step was read
  bool needs_host = false;     // the host reads logits of it before the next step replaces them
  bool abandoned = false;      // a cancel ended it: it counts as not run
  std::exception_ptr failure;  // of the submission
  Clock::time_point start;

  // Prepares for a new step. `before_read`: the previous one has not been read.
  void begin(bool before_read) {
    jobs.clear();
    job_sequences.clear();
    overlapped = before_read;
    abandoned = false;
    failure = nullptr;
    start = Clock::now();
  }

  // Drops the results of a sequence that leaves.
  void forget(const SequenceState& sequence) {
    for (PlannedSequence& planned : plan.sequences)
      if (planned.sequence == &sequence) planned.sequence = nullptr;
    for (SequenceState*& job : job_sequences)
      if (job == &sequence) job = nullptr;
  }
};

}  // namespace turbomind
