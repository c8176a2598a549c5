// Counters of launches by kernel, and the seeds of their schedules. Internal to the emulator.
#pragma once

#include <cstdint>

#include "cuda/emulator.h"

namespace turbomind::emulator {

// Returns the seed of the next launch.
uint64_t next_seed();
void count_launch(const char* kernel, const LaunchCounters& done);

}  // namespace turbomind::emulator
