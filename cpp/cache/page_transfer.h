// A copy of a page between a device and host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace turbomind {

// One piece of a payload. A payload is one piece of memory or several, in order.
struct PayloadPart {
  uint8_t* data = nullptr;
  size_t bytes = 0;
};

// Copies the first `count` of the `stored` tokens of the payload; a copy from the device has stored
// = count.
struct PageTransfer {
  int group = 0;
  int32_t page = -1;
  int count = 0;
  int stored = 0;
  std::vector<PayloadPart> parts;
};

}  // namespace turbomind
