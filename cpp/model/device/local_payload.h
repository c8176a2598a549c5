// The heads of one rank out of a payload, in one piece of memory. Pages pass through it where they
// cannot be copied straight from and to the payload.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/page_copy_cuda.h"
#include "cache/page_io.h"

namespace turbomind {

// `layers` and `transfer` stay alive. `data` has the size of a page's first transfer.stored tokens
// and their order: that of a payload without other heads.
struct LocalPayload {
  const std::vector<PageLayerCuda>& layers;
  const PageTransfer& transfer;
  uint8_t* data;

  void gather() const;   // from the payload
  void scatter() const;  // to the payload: only heads that this rank reads out of the page
};

}  // namespace turbomind
