#include "model/device/step_graphs.h"

#include <string>
#include <utility>

#include "core/error.h"

namespace turbomind {

void StepGraphs::run(StepKey key, const std::function<void()>& submit, bool first,
                     const std::function<void()>& captured) {
  if (gpu_.epoch() != epoch_) {
    graphs_.clear();
    epoch_ = gpu_.epoch();
  }
  if (key.rows == 0 || !gpu_.switches().graphs) return submit();
  const auto [it, unknown] = graphs_.try_emplace(key);
  if (unknown || first) return submit();
  Entry& entry = it->second;
  if (!entry.graph && !entry.refused) {
    capture(entry, submit);
    captured();
  }
  if (entry.refused) return submit();
  entry.graph.launch(gpu_.stream());
}

// A capture fails for lack of memory, or with a driver that cannot capture. Steps are slower then,
// and as correct. An error of the step itself is thrown when the step runs uncaptured.
void StepGraphs::capture(Entry& entry, const std::function<void()>& submit) {
  try {
    entry.graph = GpuGraph(gpu_.stream(), submit);
  } catch (const Error& e) {
    entry.refused = true;
    if (!std::exchange(noted_, true))
      gpu_.add_note(std::string("steps of some kinds are not captured: ") + e.what());
  }
}

}  // namespace turbomind
