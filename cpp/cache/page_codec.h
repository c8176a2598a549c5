// A page between the order its memory has (cache/kv_layout.h) and the order it is stored in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/kv_layout.h"

namespace turbomind {

// Canonical order, of one cache group's page: [layer][K|V][head][token][dim], the KV dtype, real
// widths. It depends on the model alone: neither on the instruction set nor on the device. All
// functions may run on any thread while nobody writes the page.
class PageCodec {
 public:
  PageCodec() = default;
  explicit PageCodec(std::vector<KvLayout> layers);  // of one group, in order

  // Payload of a page with `count` tokens.
  size_t bytes(int count) const { return count * token_bytes_; }
  // The page's first `count` tokens.
  void read(const uint8_t* page, int count, uint8_t* out) const;
  // The first `count` of the `stored` tokens that `in` has. Padding and the slots behind `count`
  // become zero.
  void write(uint8_t* page, int count, const uint8_t* in, int stored) const;

 private:
  void check(int count, int most) const;

  std::vector<KvLayout> layers_;
  size_t token_bytes_ = 0;
  int page_tokens_ = kPageTokens;
};

}  // namespace turbomind
