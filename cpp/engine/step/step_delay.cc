#include "engine/step/step_delay.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace turbomind {

namespace {

std::atomic<int> delay{0};

}  // namespace

void set_step_delay(int microseconds) {
  delay = microseconds;
}

void delay_step() {
  const int microseconds = delay.load(std::memory_order_relaxed);
  if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace turbomind
