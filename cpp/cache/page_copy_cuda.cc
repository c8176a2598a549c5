#include "cache/page_copy_cuda.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "cuda/dispatch.h"

namespace turbomind {

TM_GPU_TABLE(PageCopyCuda, kPageCopyCuda, page_copy_cuda)

std::vector<PageLayerCuda> page_layers_cuda(const std::vector<KvLayout>& layers) {
  std::vector<PageLayerCuda> out;
  int64_t before = 0, stored_before = 0;
  for (const KvLayout& l : layers) {
    if (!kGpuKvTypes.has(l.dtype) || l.page_tokens != kPageTokens || l.k_dim % 8 || l.v_dim % 8) {
      throw_error(ErrorCode::internal, "pages on a GPU: heads of ", l.k_dim, " and ", l.v_dim, " ",
                  dtype_name(l.dtype), ", ", l.page_tokens,
                  " tokens a page; expected multiples of 8, bfloat16 or float16, ", kPageTokens,
                  " tokens");
    }
    const HeadSlice& slice = l.slice;
    if (slice.first < 0 || slice.first + l.kv_heads > l.stored_heads()) {
      throw_error(ErrorCode::internal, "pages on a GPU: heads from ", slice.first, " to ",
                  slice.first + l.kv_heads, ", expected 0 to ", l.stored_heads());
    }
    out.push_back({before, stored_before, l.kv_heads, l.k_dim, l.v_dim, slice.first,
                   l.stored_heads(), slice.reads});
    before += int64_t{2} * l.kv_heads * (l.k_dim + l.v_dim);
    stored_before += int64_t{2} * l.stored_heads() * (l.k_dim + l.v_dim);
  }
  return out;
}

int64_t page_token_bytes(const std::vector<PageLayerCuda>& layers) {
  if (layers.empty()) return 0;
  const PageLayerCuda& last = layers.back();
  return last.token_bytes_before + int64_t{2} * last.kv_heads * (last.k_dim + last.v_dim);
}

int64_t stored_token_bytes(const std::vector<PageLayerCuda>& layers) {
  if (layers.empty()) return 0;
  const PageLayerCuda& last = layers.back();
  return last.stored_bytes_before + int64_t{2} * last.stored_heads * (last.k_dim + last.v_dim);
}

void copy_read_heads(const std::vector<PageLayerCuda>& layers, int count, const uint8_t* from,
                     uint8_t* to) {
  for (const PageLayerCuda& layer : layers) {
    int64_t begin = layer.stored_bytes_before * count;
    for (const int dim : {layer.k_dim, layer.v_dim}) {
      const int64_t head = int64_t{2} * dim * count, at = begin + layer.first_head * head;
      if (layer.reads) std::memcpy(to + at, from + at, static_cast<size_t>(layer.kv_heads * head));
      begin += layer.stored_heads * head;
    }
  }
}

void copy_pages(GpuKind kind, StreamHandle stream, uint8_t* base, int64_t page_bytes,
                const int32_t* from, const int32_t* to, int count) {
  if (page_bytes % 16)
    throw_error(ErrorCode::internal, "copy_pages: pages of ", page_bytes,
                " bytes, expected a multiple of 16");
  for (int done = 0; done < count; done += CopyPagesCuda::kMost) {
    CopyPagesCuda job{base, page_bytes, std::min(count - done, CopyPagesCuda::kMost), {}, {}};
    std::copy_n(from + done, job.count, job.from);
    std::copy_n(to + done, job.count, job.to);
    page_copy_cuda(kind).copy(stream, job);
  }
}

namespace {

void check(const PageTokensCuda& job, const std::vector<PayloadPart>& parts) {
  if (job.count < 1 || job.count > job.stored || job.stored > kPageTokens)
    throw_error(ErrorCode::internal, "page copy: ", job.count, " of ", job.stored,
                " tokens, expected 1 to ", kPageTokens);
  size_t bytes = 0;
  for (const PayloadPart& part : parts) {
    if (bytes % 16 || reinterpret_cast<uintptr_t>(part.data) % 16)
      throw_error(ErrorCode::internal, "page copy: a part of the payload from byte ", bytes,
                  " on is at ", static_cast<const void*>(part.data), ", expected multiples of 16");
    bytes += part.bytes;
  }
  const auto want = static_cast<size_t>(job.stored * job.stored_token_bytes);
  if (bytes != want)
    throw_error(ErrorCode::internal, "page copy: a payload of ", bytes, " bytes, expected ", want);
}

void move(GpuKind kind, StreamHandle stream, const PageTokensCuda& job,
          const std::vector<PayloadPart>& parts, bool to_page) {
  check(job, parts);
  MoveTokensCuda m{job, to_page, 0, 0, {}, {}};
  int64_t end = 0;
  for (const PayloadPart& part : parts) {
    end += static_cast<int64_t>(part.bytes);
    m.ends[m.num_parts] = end;
    m.data[m.num_parts++] = part.data;
    if (m.num_parts < MoveTokensCuda::kMost && &part != &parts.back()) continue;
    page_copy_cuda(kind).move(stream, m);
    m.begin = end;
    m.num_parts = 0;
  }
}

}  // namespace

void read_page_tokens(GpuKind kind, StreamHandle stream, const PageTokensCuda& job,
                      const std::vector<PayloadPart>& parts) {
  move(kind, stream, job, parts, false);
}

void write_page_tokens(GpuKind kind, StreamHandle stream, const PageTokensCuda& job,
                       const std::vector<PayloadPart>& parts) {
  move(kind, stream, job, parts, true);
}

}  // namespace turbomind
