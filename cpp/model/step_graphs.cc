#include "model/step_graphs.h"

namespace turbomind {

void StepGraphs::run(StepKey key, const std::function<void()>& submit) {
  if (gpu_.epoch() != epoch_) {
    graphs_.clear();
    epoch_ = gpu_.epoch();
  }
  if (key.rows == 0) return submit();
  const auto [it, first] = graphs_.try_emplace(key);
  if (first) return submit();
  if (!it->second.graph) it->second.graph = GpuGraph(gpu_.stream(), submit);
  it->second.graph.launch(gpu_.stream());
}

}  // namespace turbomind
