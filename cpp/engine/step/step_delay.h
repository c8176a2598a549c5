// Slow steps for tests: whose replies would else end before the test has acted on them.
#pragma once

namespace turbomind {

// Lets every later step of any engine begin so many microseconds late; 0: at once.
void set_step_delay(int microseconds);
// Waits for as long.
void delay_step();

}  // namespace turbomind
