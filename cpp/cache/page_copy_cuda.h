// Kernels that copy pages on a GPU: whole pages to other pages, and the first tokens of a page to
// or from a payload in the order pages are stored in (page_codec.h). A full page has that order
// already, unless it has the heads of one rank alone.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/kv_layout.h"
#include "cache/page_io.h"
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
// Copies the heads that read_page_tokens copies, from a payload of `count` tokens to another one.
void copy_read_heads(const std::vector<PageLayerCuda>& layers, int count, const uint8_t* from,
                     uint8_t* to);

// Copies pages from[i] to to[i], all different. Page p is at base + p * page_bytes.
void copy_pages(GpuKind kind, StreamHandle stream, uint8_t* base, int64_t page_bytes,
                const int32_t* from, const int32_t* to, int count);

// The first `count` tokens of a page are copied from or to a payload of `stored` tokens. The rest
// of the page is unchanged, and so are other heads of the payload.
struct PageTokensCuda {
  uint8_t* page;                // aligned to 16 bytes
  const PageLayerCuda* layers;  // device memory
  int num_layers;
  int stored;
  int count;
  int64_t token_bytes;         // page_token_bytes
  int64_t stored_token_bytes;  // of the payload
};
// The parts are device memory, or pinned host memory. They begin at multiples of 16 bytes, in
// memory as in the payload.
void read_page_tokens(GpuKind kind, StreamHandle stream, const PageTokensCuda& job,
                      const std::vector<PayloadPart>& parts);
void write_page_tokens(GpuKind kind, StreamHandle stream, const PageTokensCuda& job,
                       const std::vector<PayloadPart>& parts);

// Pairs of pages of one launch.
struct CopyPagesCuda {
  static constexpr int kMost = 256;
  uint8_t* base;
  int64_t page_bytes;
  int count;
  int32_t from[kMost], to[kMost];
};

// Parts of a payload of one launch, which moves what lies in them.
struct MoveTokensCuda {
  static constexpr int kMost = 64;
  PageTokensCuda job;
  bool to_page;
  int num_parts;
  int64_t begin;  // of the first part in the payload
  int64_t ends[kMost];
  uint8_t* data[kMost];
};

struct PageCopyCuda {
  void (*copy)(StreamHandle stream, const CopyPagesCuda& job);
  void (*move)(StreamHandle stream, const MoveTokensCuda& job);
};

}  // namespace turbomind
