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

// Returns the host tier and the disk tier, as far as `options` ask for them, best first. Throws
// Error(invalid_request) for options that contradict each other, and what the tiers throw.
TierPtrs make_tiers(const EngineOptions& options, const Model& model);

// Returns the speed to assume of each of `tiers` tiers until loads have been measured. Measures the
// disk for a quarter of a second; `recorded` replaces that unless the disk now seems far faster.
std::vector<ReadSpeed> first_speeds(const EngineOptions& options, const Model& model, size_t tiers,
                                    const std::optional<SpeedRecord>& recorded);

}  // namespace turbomind
