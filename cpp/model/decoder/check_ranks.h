// Whether a model can be cut over ranks.
#pragma once

#include "linear/weight_format.h"
#include "model/config.h"

namespace turbomind {

// Throws Error(model) for a config out of range, and Error(invalid_request) unless the model can be
// cut over `ranks` there: it has the reason and the numbers that are possible.
void check_ranks(const ModelConfig& whole, WeightPlace place, int ranks);

}  // namespace turbomind
