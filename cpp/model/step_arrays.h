// A step as the ops read it: in host memory for the CPU, in device memory for a GPU.
#pragma once

#include <memory>
#include <vector>

#include "core/context.h"
#include "model/config.h"
#include "model/model.h"
#include "ops/attention.h"

namespace turbomind {

// Pointers are to memory of the context's device and hold until the next set().
struct StepInputs {
  int64_t tokens = 0;
  int64_t samples = 0;
  const int32_t* token_ids = nullptr;    // [tokens]
  const int32_t* sample_rows = nullptr;  // [samples]
  bool all_sampled = false;              // sample_rows is 0, 1, ... tokens - 1
  std::vector<SeqBatch> groups;          // per cache group
  std::vector<StepRope> ropes;           // per rope table
};

// Steps with equal keys differ in the contents of the arrays alone: on a GPU one captured graph
// serves them all. Only steps of one token per sequence, all sampled, have a key.
struct StepKey {
  int rows = 0;   // of the batch bucket; 0: no key
  int pages = 0;  // that the longest sequence may have, per cache group
  auto operator<=>(const StepKey&) const = default;
};

class StepArrays {
 public:
  virtual ~StepArrays() = default;
  // The step's token rows are followed by padding up to the bucket where it has a key. `drawn`: on
  // a GPU, in its memory, what StepBatch::token_from points to; null where there is none.
  virtual const StepInputs& set(const StepBatch& batch, const int32_t* drawn) = 0;
  virtual StepKey key() const { return {}; }
  virtual void reserve(const StepLimits&) {}  // see Model::reserve
};

// `config` and `plan` stay alive.
std::unique_ptr<StepArrays> make_step_arrays(Context& ctx, const ModelConfig& config,
                                             const CachePlan& plan);

}  // namespace turbomind
