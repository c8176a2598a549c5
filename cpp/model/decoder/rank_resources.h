// Threads and GPUs of a model's ranks.
#pragma once

#include <memory>
#include <vector>

#include "model/decoder/decoder.h"

namespace turbomind {

// Throws Error(invalid_request) for a list that has neither a GPU for each rank nor one for all.
// Empty: the CPU.
void check_gpu_list(const std::vector<GpuOptions>& gpus, int ranks);

// Makes the resources of each rank. On the CPU `threads` are divided, and each rank has one at
// least; on GPUs the first rank has them, for what the host samples. Throws Error(invalid_request)
// for GPUs that are not there or differ: all compute the same bits.
std::vector<std::unique_ptr<DecoderResources>> make_rank_resources(
    Isa isa, int threads, const std::vector<GpuOptions>& gpus, int ranks);

}  // namespace turbomind
