// A test of waits on a real GPU: kernels whose inputs come late. Without it a kernel that reads the
// output of its predecessor too early mostly finds it there.
#pragma once

namespace turbomind {

// Has every later launch of this process preceded by a kernel that lets its successor start at once
// and itself ends so many microseconds after its predecessor; 0: none. So a kernel, its predecessor
// and what that one waits for are on the device together (programmatic dependent launch), captured
// or not. No effect in the emulator and on devices that do not overlap kernels.
void set_launch_delay(int microseconds);
int launch_delay();

}  // namespace turbomind
