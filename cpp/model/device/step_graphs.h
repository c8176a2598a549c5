// One captured graph per kind of decode step: a step is then one launch instead of hundreds.
#pragma once

#include <functional>
#include <map>

#include "cuda/gpu_context.h"
#include "model/step_arrays.h"

namespace turbomind {

class StepGraphs {
 public:
  explicit StepGraphs(GpuContext& gpu) : gpu_(gpu) {}

  // Submits what `submit` submits. Steps without a key, and the first of each key, which may still
  // allocate, run as they are; then one is captured and replayed. A key whose capture fails runs as
  // it is from then on, at least until memory moves; the first failure is noted in the context.
  void run(StepKey key, const std::function<void()>& submit);

 private:
  struct Entry {
    GpuGraph graph;        // empty until the second step
    bool refused = false;  // none could be made
  };

  void capture(Entry& entry, const std::function<void()>& submit);

  GpuContext& gpu_;
  std::map<StepKey, Entry> graphs_;
  uint64_t epoch_ = 0;  // of the context when the graphs were captured
  bool told_ = false;   // of a failure
};

}  // namespace turbomind
