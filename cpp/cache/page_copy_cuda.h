// Kernels that copy pages on a GPU: whole pages to other pages, and the first tokens of a page to
// or from a contiguous buffer in the order pages are stored in (page_codec.h). A full page has that
// order already.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_layout.h"
#include "cuda/gpu.h"
#include "cuda/types.h"

namespace turbomind {

// One layer of a cache group. Pages hold layers one after another without gaps. Stored pages do
// too, but with all heads where the page has those of one rank.
struct PageLayerCuda {
  int64_t token_bytes_before;   // of the layers before it: its offset in a page / 64
  int64_t stored_bytes_before;  // the same with all heads: its offset in a stored page / tokens
  int32_t kv_heads;
  int32_t k_dim;  // 16-bit elements, multiples of 8
  int32_t v_dim;
  int32_t first_head;  // of kv_heads, among stored_heads
  int32_t stored_heads;
  int32_t reads;  // 0: another rank reads these heads out of its page
};

// Returns the layers for the kernels. Offsets of the layouts are ignored. Throws Error(internal)
// for widths and types that pages on a GPU do not have.
std::vector<PageLayerCuda> page_layers_cuda(const std::vector<KvLayout>& layers);
int64_t page_token_bytes(const std::vector<PageLayerCuda>& layers);
int64_t stored_token_bytes(const std::vector<PageLayerCuda>& layers);  // with all heads

// Copies pages from[i] to to[i], all different. Page p is at base + p * page_bytes.
void copy_pages(GpuKind kind, StreamHandle stream, uint8_t* base, int64_t page_bytes,
                const int32_t* from, const int32_t* to, int count);

// `plain` holds `stored` tokens in stored order, the first `count` of which are copied. The rest of
// the page is unchanged, and so are other heads of `plain`.
struct PageTokensCuda {
  uint8_t* page;                // aligned to 16 bytes, as `plain`
  uint8_t* plain;               // device memory, or pinned host memory mapped to the device
  const PageLayerCuda* layers;  // device memory
  int num_layers;
  int stored;
  int count;
  int64_t token_bytes;  // page_token_bytes
};
void read_page_tokens(GpuKind kind, StreamHandle stream, const PageTokensCuda& job);
void write_page_tokens(GpuKind kind, StreamHandle stream, const PageTokensCuda& job);

// Pairs of pages of one launch.
struct CopyPagesCuda {
  static constexpr int kMost = 256;
  uint8_t* base;
  int64_t page_bytes;
  int count;
  int32_t from[kMost], to[kMost];
};

struct PageCopyCuda {
  void (*copy)(StreamHandle stream, const CopyPagesCuda& job);
  void (*move)(StreamHandle stream, const PageTokensCuda& job, bool to_page);
};

}  // namespace turbomind
