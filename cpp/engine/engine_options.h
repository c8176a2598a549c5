// Options of an engine, one struct from Python's EngineConfig to the engine thread. Options of one
// request are in engine/request_options.h and sampling/sampling_params.h.
#pragma once

#include <cstdint>
#include <string>

namespace turbomind {

struct EngineOptions {
  int max_batch_size = 16;  // rows of the persistent batch
  int64_t max_context_tokens =
      0;  // 0: the model's; never more than one sequence's share of the pool
  int64_t cache_bytes = int64_t{2} << 30;
  // Above 0 overrides cache_bytes: of the device's memory that is free beside weights and steps, of
  // which a GPU keeps 256 MiB.
  double cache_share = 0;
  int64_t cache_pages = 0;   // > 0 overrides both: pages per cache group (tests)
  int prefill_chunk = 0;     // most prompt tokens of one step; 0: 512
  double step_ms = 100;      // target time of a step that ends with a token; others: four times
  bool prefix_reuse = true;  // look up sealed pages of other requests
  bool warm_up = false;      // of a GPU: see Model::warm_up

  // Tiers below the device, for the pages of handles that persist; they need prefix_reuse.
  int64_t host_bytes = 0;   // 0: no pages in the host's memory
  std::string page_folder;  // empty: no pages on disk
  int64_t disk_quota = 0;   // bytes; 0: no limit
};

}  // namespace turbomind
