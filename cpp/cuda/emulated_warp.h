// The warp-level operations, done by the lane that arrives last, for all. Of the emulator's own
// files alone.
#pragma once

#include "cuda/emulated_thread.h"

namespace turbomind::emulator {

void do_shuffle(const Warp& warp);
void do_vote(const Warp& warp);
void do_mma(const Warp& warp);
void do_ldmatrix(const Warp& warp);

}  // namespace turbomind::emulator
