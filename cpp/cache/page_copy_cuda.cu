// Copies in units of 16 bytes; a thread has four in flight at a time.
#include "cache/page_copy_cuda.h"

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;
constexpr int kUnit = 16;

struct Place {
  const uint4* from;
  uint4* to;
};

// place(i) returns where unit i of `units` is read and written, or nulls to leave it out.
template <typename F>
TM_DEVICE void copy_units(int64_t units, int blocks, int block, const F& place) {
  const int64_t step = int64_t{blocks} * kThreads;
  for (int64_t i = int64_t{block} * kThreads + threadIdx.x; i < units; i += kAhead * step) {
    Place at[kAhead] = {};
    uint4 unit[kAhead] = {};
    for (int j = 0; j < kAhead; ++j) {
      if (i + j * step < units) at[j] = place(i + j * step);
      if (at[j].from != nullptr) unit[j] = load_streaming(at[j].from);
    }
    for (int j = 0; j < kAhead; ++j)
      if (at[j].to != nullptr) store(at[j].to, unit[j]);
  }
}

// Returns the address of a byte of the payload; null where it is in no part of this launch.
TM_DEVICE uint8_t* in_parts(const MoveTokensCuda& m, int64_t at) {
  int part = 0;  // the first that ends after the byte, or the last
  for (int step = MoveTokensCuda::kMost / 2; step > 0; step /= 2)
    if (part + step < m.num_parts && m.ends[part + step - 1] <= at) part += step;
  const int64_t begin = part == 0 ? m.begin : m.ends[part - 1];
  return at < begin || at >= m.ends[part] ? nullptr : m.data[part] + (at - begin);
}

}  // namespace

TM_KERNEL(kThreads, 4) void copy_whole_pages(const TM_GRID_CONSTANT CopyPagesCuda p) {
  let_next_start();
  wait_for_previous();
  const uint8_t* from = p.base + p.from[blockIdx.x] * p.page_bytes;
  uint8_t* to = p.base + p.to[blockIdx.x] * p.page_bytes;
  copy_units(p.page_bytes / kUnit, gridDim.y, blockIdx.y, [&](int64_t i) -> Place {
    return {reinterpret_cast<const uint4*>(from) + i, reinterpret_cast<uint4*>(to) + i};
  });
}

// A block copies a part of one layer. The first tokens of a head are contiguous on both sides.
TM_KERNEL(kThreads, 4) void move_page_tokens(const TM_GRID_CONSTANT MoveTokensCuda m) {
  let_next_start();
  wait_for_previous();
  const PageTokensCuda& p = m.job;
  const PageLayerCuda* layer = p.layers + blockIdx.x;
  const int heads = load(&layer->kv_heads), k_dim = load(&layer->k_dim);
  const int v_dim = load(&layer->v_dim);
  const int first = load(&layer->first_head), stored_heads = load(&layer->stored_heads);
  const bool moves = m.to_page || load(&layer->reads);
  uint8_t* page = p.page + load(&layer->token_bytes_before) * kPageTokens;
  const int64_t stored_before = load(&layer->stored_bytes_before);
  const int k_units = p.count * k_dim / 8, v_units = p.count * v_dim / 8;  // of a head
  const auto place = [&](int64_t i) -> Place {
    const bool value = i >= int64_t{heads} * k_units;
    if (value) i -= int64_t{heads} * k_units;
    const int units = value ? v_units : k_units, dim = value ? v_dim : k_dim;
    const int64_t head = i / units, rest = i % units;
    const int64_t k_bytes = value ? int64_t{2} * k_dim : 0;  // of a token and head
    uint8_t* in_page = page + (heads * k_bytes + head * dim * 2) * kPageTokens + rest * kUnit;
    const int64_t stored = stored_before + stored_heads * k_bytes + (first + head) * dim * 2;
    uint8_t* in_plain = in_parts(m, stored * p.stored + rest * kUnit);
    if (in_plain == nullptr) return {nullptr, nullptr};
    return {reinterpret_cast<const uint4*>(m.to_page ? in_plain : in_page),
            reinterpret_cast<uint4*>(m.to_page ? in_page : in_plain)};
  };
  const int64_t units = moves ? int64_t{heads} * (k_units + v_units) : 0;
  copy_units(units, gridDim.y, blockIdx.y, place);
}

// Returns the number of blocks for a page or layer of so many bytes.
static int blocks_of(int64_t bytes, int64_t most) {
  constexpr int64_t kBlockBytes = kThreads * kAhead * kUnit;
  return static_cast<int>(min((bytes + kBlockBytes - 1) / kBlockBytes, most));
}

static void copy(StreamHandle stream, const CopyPagesCuda& job) {
  launch<copy_whole_pages>(stream, dim3(job.count, blocks_of(job.page_bytes, 1024)), kThreads, 0,
                           job);
}

// A page goes to or from the host beside steps, which need the multiprocessors: about this many
// blocks have 2 MiB on their way, several times what a link of 64 GB/s holds in 2 us.
constexpr int64_t kMostMovingBlocks = 128;

static void move(StreamHandle stream, const MoveTokensCuda& m) {
  const int64_t layers = max(m.job.num_layers, 1);
  const int64_t layer_bytes = m.job.token_bytes * m.job.count / layers;
  const int blocks = blocks_of(layer_bytes, max(kMostMovingBlocks / layers, int64_t{1}));
  launch<move_page_tokens>(stream, dim3(m.job.num_layers, blocks), kThreads, 0, m);
}

extern const PageCopyCuda kPageCopyCuda;
const PageCopyCuda kPageCopyCuda{copy, move};

}  // namespace turbomind::TM_CUDA_NS
