#include "model/device/local_payload.h"

#include <algorithm>
#include <cstring>

namespace turbomind {

namespace {

// Calls f(at, bytes, reads) for the ranges of a payload that the layers have, in order. The heads
// of K, and those of V, are one range.
template <typename F>
void for_ranges(const std::vector<PageLayerCuda>& layers, int tokens, const F& f) {
  for (const PageLayerCuda& layer : layers) {
    int64_t at = layer.stored_bytes_before * tokens;
    for (const int dim : {layer.k_dim, layer.v_dim}) {
      const int64_t head = int64_t{2} * dim * tokens;
      f(static_cast<size_t>(at + layer.first_head * head),
        static_cast<size_t>(layer.kv_heads * head), layer.reads != 0);
      at += layer.stored_heads * head;
    }
  }
}

// Calls f(data, bytes) for the memory of a range of a payload.
template <typename F>
void for_memory(const std::vector<PayloadPart>& parts, size_t at, size_t bytes, const F& f) {
  for (const PayloadPart& part : parts) {
    if (at >= part.bytes) {
      at -= part.bytes;
      continue;
    }
    const size_t here = std::min(bytes, part.bytes - at);
    f(part.data + at, here);
    bytes -= here;
    at = 0;
    if (bytes == 0) return;
  }
}

}  // namespace

void LocalPayload::gather() const {
  uint8_t* to = data;
  for_ranges(layers, transfer.stored, [&](size_t at, size_t bytes, bool) {
    for_memory(transfer.parts, at, bytes, [&](const uint8_t* from, size_t here) {
      std::memcpy(to, from, here);
      to += here;
    });
  });
}

void LocalPayload::scatter() const {
  const uint8_t* from = data;
  for_ranges(layers, transfer.stored, [&](size_t at, size_t bytes, bool reads) {
    const uint8_t* next = from + bytes;
    if (reads)
      for_memory(transfer.parts, at, bytes, [&](uint8_t* to, size_t here) {
        std::memcpy(to, from, here);
        from += here;
      });
    from = next;
  });
}

}  // namespace turbomind
