// A step as the ops read it: arrays in the memory of the device that runs it.
#pragma once

#include <vector>

#include "ops/attention.h"
#include "ops/rope_kv.h"

namespace turbomind {

// Pointers hold until the next step.
struct StepInputs {
  int64_t tokens = 0;  // rows of the step, padding included
  int64_t samples = 0;
  const int32_t* token_ids = nullptr;     // [tokens]
  const int32_t* sample_rows = nullptr;   // [samples]
  bool all_sampled = false;               // sample_rows is 0, 1, ... tokens - 1
  const uint32_t* first_count = nullptr;  // [1] of the exchanges of ranks on GPUs
  std::vector<SeqBatch> groups;           // per cache group
  std::vector<StepRope> ropes;            // per rope table
  // The sampled tokens alone, for the layers after the last one that writes KV; null: the device
  // has no such arrays, or they would be of no use.
  const StepInputs* sampled = nullptr;
};

}  // namespace turbomind
