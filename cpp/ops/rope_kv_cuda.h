// Norm and rotation of q and k, and the writing of K and V into pages, on a GPU. The contract is
// rope_write_kv's of ops/attention.h; the angles are computed here, from the positions.
#pragma once

#include "cuda/gpu.h"
#include "ops/attention_cuda.h"

namespace turbomind {

// Pointers are device pointers.
struct RopeKvCudaArgs {
  DType dtype;       // bf16 or f16: of q, K and V
  const float* qkv;  // [tokens, (heads + kv_heads) * k_dim + kv_heads * v_dim]
  void* q;           // [tokens, heads * k_dim]
  CudaPages pages;
  SeqArrays seqs;  // tokens of sequences with q_len 0 and pages of -1: nothing is written
  int heads;
  int kv_heads;  // 0: qkv has q alone
  int k_dim;     // multiples of 8, at most kMaxHeadDim
  int v_dim;
  const float* q_weight;  // [k_dim] of a root-mean-square norm per head; null: none
  const float* k_weight;
  float q_offset, k_offset;  // added to the weights
  float q_eps, k_eps;
  float v_eps;               // of V's norm, which has no weight; 0: none
  const int32_t* positions;  // [tokens]
  const float* inv_freq;     // [half]; RopeTable's
  int half;                  // rotated width / 2; 0: no rotation
  float attention_factor;
  bool interleaved;
};

// Throws Error(internal) for shapes the kernel does not take.
void rope_write_kv(GpuKind kind, StreamHandle stream, const RopeKvCudaArgs& args,
                   int multiprocessors);

// Values of a token: each is read once, 4 bytes, and written once, 2.
constexpr int64_t rope_kv_values(const RopeKvCudaArgs& a) {
  return int64_t{a.heads + a.kv_heads} * a.k_dim + int64_t{a.kv_heads} * a.v_dim;
}

struct RopeKvLaunch {
  RopeKvCudaArgs args;
  int blocks;  // of a token
};
struct RopeKvCuda {
  void (*write)(StreamHandle stream, const RopeKvLaunch& launch);
};

}  // namespace turbomind
