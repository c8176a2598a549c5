#include "cuda/launch_delay.h"

#include <atomic>

namespace turbomind {

namespace {

std::atomic<int> delay{0};

}  // namespace

void set_launch_delay(int microseconds) {
  delay = microseconds;
}

int launch_delay() {
  return delay.load(std::memory_order_relaxed);
}

}  // namespace turbomind
