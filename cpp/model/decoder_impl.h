// Shared between the builder and the forward pass.
#pragma once

#include <memory>

#include "core/context.h"
#include "model/config.h"
#include "model/decoder_weights.h"
#include "model/model.h"

namespace turbomind {

// Threads and instruction set; used for packing first, then for every step.
struct DecoderResources {
  DecoderResources(Isa isa, int threads) : pool(threads), context{pool, isa, profiler} {}
  ThreadPool pool;
  Profiler profiler;
  Context context;
};

std::unique_ptr<Model> make_decoder(const ModelConfig& config,
                                    std::unique_ptr<DecoderResources> resources,
                                    DecoderWeights weights);

}  // namespace turbomind
