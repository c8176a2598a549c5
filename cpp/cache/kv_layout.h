// Layout of a page in memory, and cache groups. The order pages are stored in is in page_codec.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/kv_types.h"
#include "core/tensor.h"

namespace turbomind {

// Tokens of a page (vLLM: block size). The only place that defines it; Python has _C.PAGE_TOKENS.
constexpr int kPageTokens = 64;

enum class CacheKind : uint8_t { full, window, latent, recurrent };

// Where the KV heads of a rank are among all of a layer, of which stored pages have all.
struct HeadSlice {
  int first = 0;
  int all = 0;        // 0: the rank has all
  bool reads = true;  // false: an earlier rank has the same heads and reads them out of the page
};

// Geometry of one layer's K and V in a page. On a GPU it is not tiled: [head][token][dim] with real
// widths, the order pages are stored in. On the CPU both have the order in which the tile kernels
// stream them, that of a packed weight (pair = 2 for 16-bit types, 1 for float32):
//   K block of a head: [tokens/16][k_width/pair][16][pair]     (a [tokens, k_width] matrix packed
//   by rows) V block of a head: [v_width/16][tokens/pair][16][pair]     (its transpose packed by
//   rows)
// k_width is head_dim rounded up to 32, v_width is head_dim rounded up to 16; padding stays zero.
struct KvLayout {
  DType dtype = DType::bf16;
  int kv_heads = 0;
  int k_dim = 0;  // real widths
  int v_dim = 0;
  int page_tokens = kPageTokens;
  bool tiled = true;
  size_t offset = 0;  // of this layer inside its group's page, bytes
  HeadSlice slice = {};

  int stored_heads() const { return slice.all ? slice.all : kv_heads; }
  int pair() const { return kv_pair(dtype); }
  int k_width() const { return tiled ? static_cast<int>(round_up(k_dim, 32)) : k_dim; }
  int v_width() const { return tiled ? static_cast<int>(round_up(v_dim, 16)) : v_dim; }
  size_t k_head_bytes() const { return size_t(page_tokens) * k_width() * dtype_bytes(dtype); }
  size_t v_head_bytes() const { return size_t(page_tokens) * v_width() * dtype_bytes(dtype); }
  size_t layer_bytes() const { return kv_heads * (k_head_bytes() + v_head_bytes()); }
  size_t k_offset(int head) const { return offset + head * k_head_bytes(); }
  size_t v_offset(int head) const {
    return offset + kv_heads * k_head_bytes() + head * v_head_bytes();
  }
};

// The pages of one cache group in the memory of the device.
struct PageView {
  uint8_t* base = nullptr;  // page p of the group starts at base + p * page_bytes
  size_t page_bytes = 0;
};

// Layers with the same kind of attention, which share a page table (vLLM: KV cache group). A
// sequence has one page table per group.
struct CacheGroup {
  CacheKind kind = CacheKind::full;
  int window = 0;  // kind == window: a query at position p sees keys in (p - window, p]
  std::vector<int> layers;
  size_t page_bytes = 0;  // sum of layer_bytes of its layers
};

}  // namespace turbomind
