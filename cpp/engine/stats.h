// Counters and gauges of an engine, as Engine::stats() returns them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/profiler.h"
#include "tiers/tier_types.h"

namespace turbomind {

// The pages of a cache group now: free + referenced + cached = total.
struct GroupStats {
  int64_t window = 0;  // tokens; 0: full attention
  int64_t page_bytes = 0;
  int64_t total = 0, free = 0, cached = 0;
  int64_t out_of_reach = 0;  // cached ones that windows have moved past, evicted first
};

// Ops by name, in the profiler's order; those without a call are left out.
using OpTable = std::vector<std::pair<std::string, OpStat>>;

// What a rank alone has in memory, and what it has measured.
struct RankStats {
  int64_t weight_bytes = 0;
  int64_t cache_bytes = 0;  // of its part of all pages
  OpTable ops;              // its profiler's
};

// Counters run from the engine's start.
struct Stats {
  // Pages of all cache groups now: free + referenced + cached = total.
  int64_t pages_total = 0, pages_free = 0, pages_referenced = 0, pages_cached = 0;
  std::vector<GroupStats> groups;
  int64_t cache_bytes = 0;   // of all pages
  int64_t weight_bytes = 0;  // of all ranks, those that they share counted once
  std::vector<RankStats> ranks;
  int64_t tokens_prefilled = 0;  // prompt tokens computed, those after a preemption included
  int64_t tokens_decoded = 0;
  int64_t tokens_reused = 0;      // prompt tokens whose KV was found (prefix hits)
  int64_t tokens_missed = 0;      // prompt tokens whose KV was not found
  int64_t tokens_recomputed = 0;  // computed again after their KV was lost to others
  int64_t tokens_loaded = 0;      // of them, loaded from a lower tier
  int64_t steps = 0;
  int64_t steps_overlapped = 0;  // submitted before the previous step was read
  int64_t preemptions = 0;
  int64_t requests_started = 0;  // requests that have had a slot
  double queue_seconds = 0;      // waited by them for the first slot, in all
  int64_t prefixes_awaited = 0;  // requests that waited for a prefix in flight
  int64_t slots = 0;             // slots of the batch in use now
  int64_t waiting = 0;           // sequences that wait for a slot now
  int64_t handles = 0;           // open now
  int64_t max_context = 0;       // most tokens of a sequence
  double last_step_ms = 0;
  OpTable ops;                                 // of all ranks: join_stats()
  std::vector<TierStats> tiers;                // lower tiers, best first
  int64_t pages_loaded = 0, pages_saved = 0;   // from and to lower tiers
  int64_t failed_loads = 0, failed_saves = 0;  // pages; they are computed again
};

}  // namespace turbomind
