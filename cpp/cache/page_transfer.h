// A page on its way between a device and the host's memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace turbomind {

// A payload is in one piece of memory or in several, in this order.
struct PayloadPart {
  uint8_t* data = nullptr;
  size_t bytes = 0;
};

// The first `count` of the `stored` tokens that the payload has, or is to have (then as many).
struct PageTransfer {
  int group = 0;
  int32_t page = -1;
  int count = 0;
  int stored = 0;
  std::vector<PayloadPart> parts;
};

}  // namespace turbomind
