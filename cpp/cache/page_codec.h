// Converts a page between the layout of its memory (kv_layout.h) and the order it is stored in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/kv_layout.h"

namespace turbomind {

// Canonical order of a page of one cache group: [layer][K|V][head][token][dim] in the KV dtype,
// real widths. It depends on the model alone, not on instruction set, device or ranks: the codec of
// a rank converts its heads inside the payload of all. Any thread, as long as no other thread
// writes the page.
class PageCodec {
 public:
  PageCodec() = default;
  explicit PageCodec(std::vector<KvLayout> layers);  // of one group, in order

  // Returns the payload of a page with `count` tokens, in bytes.
  size_t bytes(int count) const { return count * token_bytes_; }
  // Writes the page's first `count` tokens to `out` [bytes(count)], of the heads that the layouts
  // have and that no earlier rank has.
  void read(const uint8_t* page, int count, uint8_t* out) const;
  // Reads the first `count` of the `stored` tokens of `in` [bytes(stored)] into the page. Padding
  // and tokens from `count` on become zero.
  void write(uint8_t* page, int count, const uint8_t* in, int stored) const;

 private:
  void check(int count, int most) const;

  std::vector<KvLayout> layers_;
  size_t token_bytes_ = 0;
  int page_tokens_ = kPageTokens;
};

}  // namespace turbomind
