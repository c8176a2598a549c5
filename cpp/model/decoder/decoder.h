// One forward pass for all decoder-only families, from a list of per-layer structs.
#pragma once

#include <memory>

#include "core/context.h"
#include "cuda/gpu_context.h"
#include "cuda/gpu_timer.h"
#include "model/config.h"
#include "model/decoder/decoder_weights.h"
#include "model/model.h"
#include "model/parallel/rank_sums.h"

namespace turbomind {

// Threads, instruction set and GPU; used for packing first, then for every step.
struct DecoderResources {
  // `same_gpu`: of another rank on the same GPU; else null.
  DecoderResources(Isa isa, int threads, const GpuOptions* gpu_options, const GpuContext* same_gpu)
      : pool(threads, before_sleep(isa)),
        gpu(gpu_options ? std::make_unique<GpuContext>(*gpu_options, same_gpu) : nullptr),
        timer(gpu ? std::make_unique<GpuTimer>(gpu->stream()) : nullptr),
        context{pool, isa, profiler, gpu.get()} {
    profiler.device = timer.get();
  }
  ThreadPool pool;
  Profiler profiler;
  std::unique_ptr<GpuContext> gpu;
  std::unique_ptr<GpuTimer> timer;
  Context context;
};

// `link`: of a rank of several, whose config and weights are its part of the model.
std::unique_ptr<Model> make_decoder(const ModelConfig& config,
                                    std::unique_ptr<DecoderResources> resources,
                                    DecoderWeights weights, RankLink link);

}  // namespace turbomind
