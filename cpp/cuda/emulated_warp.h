// The warp-level operations. The lane that arrives last runs them for all lanes. Internal to the
// emulator.
#pragma once

#include "cuda/emulated_thread.h"

namespace turbomind::emulator {

void do_shuffle(const Warp& warp);
void do_vote(const Warp& warp);
void do_mma(const Warp& warp);
void do_ldmatrix(const Warp& warp);

}  // namespace turbomind::emulator
