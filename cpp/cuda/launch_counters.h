// What launches did, by kernel, and the seed of their schedules. Of the emulator's own files alone.
#pragma once

#include <cstdint>

#include "cuda/emulator.h"

namespace turbomind::emulator {

// Of the next launch.
uint64_t next_seed();
void count_launch(const char* kernel, const LaunchCounters& done);

}  // namespace turbomind::emulator
