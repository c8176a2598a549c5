// gpu_bench: attention over pages, and writing pages.
#pragma once

#include <cmath>
#include <numeric>

#include "cache/kv_layout.h"
#include "ops/attention_cuda.h"
#include "ops/rope_kv_cuda.h"
#include "tests/bench/gpu_bench.h"

namespace turbomind {

struct HeadShape {
  int heads, kv_heads, dim;
  int64_t page_bytes() const { return int64_t{2} * kPageTokens * kv_heads * dim * 2; }
  int64_t v_offset() const { return int64_t{2} * kPageTokens * kv_heads * dim; }
};

// A batch of equal sequences: each adds `queries` tokens and then has `keys`.
struct BatchShape {
  int batch;
  int64_t queries, keys;
  int64_t tokens() const { return batch * queries; }
  int64_t pages_each() const { return (keys + kPageTokens - 1) / kPageTokens; }
};

// Pages of a batch in shuffled order, with the arrays of a step.
struct PagedBatch {
  CudaPages pages{};
  SeqArrays seqs{};

  PagedBatch(Arena& arena, const HeadShape& h, const BatchShape& s) {
    const int64_t count = s.batch * s.pages_each();
    pages = {arena.take<uint8_t>(count * h.page_bytes()), h.page_bytes(), 0, h.v_offset()};
    std::vector<int32_t> ids(count), begin(s.batch), seq_of_token(s.tokens());
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(3));
    for (int i = 0; i < s.batch; ++i) begin[i] = static_cast<int32_t>(i * s.queries);
    for (int64_t t = 0; t < s.tokens(); ++t) seq_of_token[t] = static_cast<int32_t>(t / s.queries);
    const std::vector<int32_t> lengths(s.batch, static_cast<int32_t>(s.queries));
    const std::vector<int32_t> pasts(s.batch, static_cast<int32_t>(s.keys - s.queries));
    seqs = {arena.put(begin),
            arena.put(lengths),
            arena.put(pasts),
            arena.put(ids),
            arena.put(seq_of_token),
            s.batch,
            static_cast<int>(s.pages_each()),
            static_cast<int>(s.tokens())};
  }
};

inline std::string heads_name(const HeadShape& h) {
  return std::to_string(h.heads) + "/" + std::to_string(h.kv_heads) + " heads of " +
         std::to_string(h.dim);
}

inline AttentionLaunch take_attention(Bench& b, const HeadShape& h, const BatchShape& s) {
  const PagedBatch paged(b.arena, h, s);
  AttentionLaunch launch{};
  AttentionCudaArgs& a = launch.args;
  a.dtype = DType::bf16;
  a.q = b.arena.take<uint16_t>(s.tokens() * h.heads * h.dim);
  a.out = b.arena.take<uint16_t>(s.tokens() * h.heads * h.dim);
  a.pages = paged.pages;
  a.seqs = paged.seqs;
  a.heads = h.heads;
  a.kv_heads = h.kv_heads;
  a.k_dim = a.v_dim = h.dim;
  a.scale = 1 / std::sqrt(static_cast<float>(h.dim));
  const AttentionBounds bounds{s.batch, static_cast<int>(s.tokens()), s.keys, s.queries == 1,
                               s.queries > 1};
  launch.plan = plan_attention(a, bounds, b.gpu.limits());
  a.workspace = b.arena.take<float>(static_cast<int64_t>(launch.plan.workspace_bytes / 4) + 4);
  return launch;
}

// Bytes: K and V as the kernels' plan loads them, queries and results once.
inline Work attention_work(const AttentionLaunch& l, const HeadShape& h, const BatchShape& s) {
  std::vector<HostSeq> seqs;
  for (int i = 0; i < s.batch; ++i) seqs.push_back({i * s.queries, s.queries, s.keys - s.queries});
  const double pairs = 0.5 * s.queries * (2.0 * s.keys - s.queries + 1) * s.batch;
  const double rows = static_cast<double>(s.tokens()) * h.heads * h.dim;
  return {static_cast<double>(attention_kv_bytes(l.args, l.plan, seqs.data(), s.batch)) + 4 * rows,
          4 * pairs * h.heads * h.dim};
}

inline void bench_attention_of(Bench& b, const HeadShape& h, const BatchShape& s) {
  Figure figure{s.queries == 1 ? "attention_decode" : "attention_prefill",
                heads_name(h),
                {{"batch", s.batch},
                 {"queries", s.queries},
                 {"keys", s.keys},
                 {"heads", h.heads},
                 {"kv_heads", h.kv_heads},
                 {"dim", h.dim}},
                ""};
  try {
    b.arena.reset();
    std::vector<AttentionLaunch> sets{take_attention(b, h, s)};
    const Work work = attention_work(sets[0], h, s);
    const AttentionPlan& plan = sets[0].plan;
    figure.path = (s.queries == 1 ? plan.decode_spans : plan.chunk_spans) ? "spans" : "splits";
    while (static_cast<int>(sets.size()) < b.sets(work.bytes))
      sets.push_back(take_attention(b, h, s));
    figure.print(b.measure(static_cast<int>(sets.size()), work,
                           [&](int set) { attention(b.gpu.kind(), b.gpu.handle(), sets[set]); }),
                 work);
  } catch (const Error& e) {
    figure.print_error(e.what());
  }
}

inline void bench_attention(Bench& b) {
  if (b.quick) {
    bench_attention_of(b, {4, 2, 32}, {2, 1, 70});
    bench_attention_of(b, {4, 2, 32}, {1, 20, 70});
    return;
  }
  const HeadShape llama{32, 8, 128};
  for (const int batch : {1, 32, 64})
    for (const int64_t keys : {512, 4096, 8192, 32768})
      if (batch * keys <= 64 * 8192 || batch == 32) bench_attention_of(b, llama, {batch, 1, keys});
  for (const HeadShape& h : {HeadShape{28, 4, 128}, HeadShape{32, 8, 64}})
    for (const int batch : {1, 32}) bench_attention_of(b, h, {batch, 1, 4096});
  for (const HeadShape& h : {llama, HeadShape{32, 8, 64}})
    for (const auto& [queries, keys] :
         {std::pair<int64_t, int64_t>{2048, 2048}, {2048, 8192}, {64, 8256}})
      bench_attention_of(b, h, {1, queries, keys});
}

inline RopeKvCudaArgs take_rope(Arena& arena, const HeadShape& h, const BatchShape& s) {
  const PagedBatch paged(arena, h, s);
  std::vector<float> inv_freq;
  for (int i = 0; i < h.dim / 2; ++i)
    inv_freq.push_back(std::pow(500000.0f, -2.0f * static_cast<float>(i) / h.dim));
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < s.tokens(); ++t)
    positions.push_back(static_cast<int32_t>(s.keys - s.queries + t % s.queries));
  RopeKvCudaArgs a{};
  a.dtype = DType::bf16;
  a.heads = h.heads, a.kv_heads = h.kv_heads, a.k_dim = a.v_dim = h.dim;
  a.qkv = arena.take<float>(s.tokens() * rope_kv_values(a));
  a.q = arena.take<uint16_t>(s.tokens() * h.heads * h.dim);
  a.pages = paged.pages;
  a.seqs = paged.seqs;
  a.positions = arena.put(positions);
  a.inv_freq = arena.put(inv_freq);
  a.half = h.dim / 2;
  a.attention_factor = 1;
  return a;
}

inline void bench_rope(Bench& b) {
  const HeadShape h = b.quick ? HeadShape{4, 2, 32} : HeadShape{32, 8, 128};
  std::vector<BatchShape> shapes{{1, 1, 512}, {64, 1, 512}, {1, 2048, 2048}};
  if (b.quick) shapes = {{2, 1, 70}, {1, 5, 70}};
  for (const BatchShape& s : shapes) {
    Figure figure{
        "rope_write_kv",
        heads_name(h),
        {{"tokens", s.tokens()}, {"heads", h.heads}, {"kv_heads", h.kv_heads}, {"dim", h.dim}},
        ""};
    try {
      b.arena.reset();
      std::vector<RopeKvCudaArgs> sets{take_rope(b.arena, h, s)};
      const double values = static_cast<double>(s.tokens() * rope_kv_values(sets[0]));
      const Work work{6 * values, 3 * values};
      while (static_cast<int>(sets.size()) < b.sets(work.bytes))
        sets.push_back(take_rope(b.arena, h, s));
      const auto submit = [&](int set) {
        rope_write_kv(b.gpu.kind(), b.gpu.handle(), sets[set], b.gpu.limits().multiprocessors);
      };
      figure.print(b.measure(static_cast<int>(sets.size()), work, submit), work);
    } catch (const Error& e) {
      figure.print_error(e.what());
    }
  }
}

}  // namespace turbomind
