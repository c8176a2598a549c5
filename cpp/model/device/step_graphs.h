// One captured graph per kind of decode step: a step is then one launch instead of hundreds.
#pragma once

#include <functional>
#include <map>

#include "cuda/gpu_context.h"
#include "model/device/device_step_arrays.h"

namespace turbomind {

class StepGraphs {
 public:
  explicit StepGraphs(GpuContext& gpu) : gpu_(gpu) {}

  // Submits the work of `submit`. Steps without a key, and the first of each key, which may still
  // allocate, run uncaptured, as does one with `first`. The next one is captured, and replayed from
  // then on; `captured` is called before the first launch. A key whose capture fails runs
  // uncaptured until memory moves. The first failure is noted in the context. All run uncaptured
  // where the environment forbids graphs (cuda/gpu_switches.h).
  void run(StepKey key, const std::function<void()>& submit, bool first,
           const std::function<void()>& captured);

 private:
  struct Entry {
    GpuGraph graph;        // empty until the second step
    bool refused = false;  // none could be made
  };

  void capture(Entry& entry, const std::function<void()>& submit);

  GpuContext& gpu_;
  std::map<StepKey, Entry> graphs_;
  uint64_t epoch_ = 0;  // of the context when the graphs were captured
  bool noted_ = false;  // a failure was noted
};

}  // namespace turbomind
