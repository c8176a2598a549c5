// Options of an engine: one struct from Python's EngineConfig to the engine thread. Options of one
// request are in engine/request_options.h and sampling/sampling_params.h.
#pragma once

#include <cstdint>
#include <string>

namespace turbomind {

struct EngineOptions {
  int max_batch_size = 16;  // slots of the persistent batch, 1 to 4096
  // Most tokens of a sequence. 0: the model's limit. The page pool may allow fewer.
  int64_t max_context_tokens = 0;
  int64_t cache_bytes = int64_t{2} << 30;  // memory of the device's pages
  // 0 to 1; above 0 it overrides cache_bytes: the share of the device's memory that is free beside
  // weights and steps. A GPU reserves 256 MiB of it for graphs and libraries.
  double cache_share = 0;
  int64_t cache_pages = 0;   // above 0 overrides both: pages per cache group (for tests)
  int prefill_chunk = 0;     // most prompt tokens of one step; 0: 512
  double step_ms = 100;      // target of a step that ends with a token; of others four times that
  bool prefix_reuse = true;  // prefix caching: requests share sealed pages
  // Run steps of every kind at start (Model::warm_up), and measure some; tiers always measure.
  bool warm_up = false;

  // Lower tiers, for the pages of handles that persist. They need prefix_reuse.
  int64_t host_bytes = 0;   // of pages in host memory; 0: no such tier
  std::string page_folder;  // of pages on disk; empty: no such tier
  int64_t disk_quota = 0;   // bytes; 0: no limit; -1: see auto_quota()
};

}  // namespace turbomind
