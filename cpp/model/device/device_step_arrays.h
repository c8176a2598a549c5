// The arrays of a step in device memory, brought there by one copy.
#pragma once

#include <memory>

#include "model/step_arrays.h"

namespace turbomind {

std::unique_ptr<StepArrays> make_device_step_arrays(GpuContext& gpu, const ModelConfig& config,
                                                    const CachePlan& plan);

// The batch bucket that `rows` sequences are padded to, and the power of two that bounds their
// pages: few enough graphs, little padding.
int row_bucket(int rows);
int page_bucket(int pages);

}  // namespace turbomind
