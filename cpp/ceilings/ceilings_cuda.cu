#include "ceilings/ceilings_cuda.h"

#include "cuda/kernel.h"

namespace turbomind::TM_CUDA_NS {

// A tile's vectors of this thread, a warp's side by side.
TM_DEVICE void load_tile(uint4 (&v)[kStreamVectors], const MemoryStream& p, int64_t tile) {
  const auto* from = static_cast<const uint4*>(p.from) + tile * (kStreamTile / 16) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kStreamVectors; ++i) v[i] = load_streaming(from + i * kStreamThreads);
}

TM_KERNEL(kStreamThreads, 1) void read_memory(const MemoryStream p) {
  let_next_start();
  wait_for_previous();
  uint4 all = make_uint4(0, 0, 0, 0);
  for (int64_t tile = blockIdx.x; tile < p.bytes / kStreamTile; tile += gridDim.x) {
    uint4 v[kStreamVectors];
    load_tile(v, p, tile);
#pragma unroll
    for (int i = 0; i < kStreamVectors; ++i) {
      all.x ^= v[i].x;
      all.y ^= v[i].y;
      all.z ^= v[i].z;
      all.w ^= v[i].w;
    }
  }
  store(static_cast<uint4*>(p.to) + blockIdx.x * kStreamThreads + threadIdx.x, all);
}

TM_KERNEL(kStreamThreads, 1) void copy_memory(const MemoryStream p) {
  let_next_start();
  wait_for_previous();
  for (int64_t tile = blockIdx.x; tile < p.bytes / kStreamTile; tile += gridDim.x) {
    uint4 v[kStreamVectors];
    load_tile(v, p, tile);
    auto* to = static_cast<uint4*>(p.to) + tile * (kStreamTile / 16) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kStreamVectors; ++i) store(to + i * kStreamThreads, v[i]);
  }
}

static void read(StreamHandle stream, const MemoryStream& p) {
  launch<read_memory>(stream, dim3(p.blocks), kStreamThreads, 0, p);
}
static void copy(StreamHandle stream, const MemoryStream& p) {
  launch<copy_memory>(stream, dim3(p.blocks), kStreamThreads, 0, p);
}

extern const CeilingsCuda kCeilingsCuda;
const CeilingsCuda kCeilingsCuda{read, copy};

}  // namespace turbomind::TM_CUDA_NS
