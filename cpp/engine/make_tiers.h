// Builds the lower tiers that an engine's options ask for.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "cost/transfer_time.h"
#include "engine/engine_options.h"
#include "model/model.h"
#include "tiers/speed_records.h"
#include "tiers/tier_types.h"

namespace turbomind {

// Those that the options ask for. Throws Error(invalid_request) for options that do not go
// together, and what the tiers throw.
TierPtrs make_tiers(const EngineOptions& options, const Model& model);
// What to believe of their speeds at first. Measures the page folder's, for a quarter of a second;
// what was `noted` of it counts unless it seems much faster now.
std::vector<ReadSpeed> first_speeds(const EngineOptions& options, const Model& model, size_t tiers,
                                    const std::optional<SpeedRecord>& noted);

}  // namespace turbomind
