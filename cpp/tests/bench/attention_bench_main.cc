// Time of the CPU's attention in milliseconds per call, and a hash of its result.
//
//   attention_bench ISA THREADS HEADS KV_HEADS HEAD_DIM REPEATS QUERIES:KEYS...
//
// Each QUERIES:KEYS is one sequence of the step: so many queries, the last of so many keys. The
// smallest of REPEATS times is printed. Results with equal hashes have equal bits.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "core/error.h"
#include "core/isa.h"
#include "core/memory.h"
#include "core/xxh64.h"
#include "ops/attention.h"

namespace turbomind {
namespace {

// Writes random bfloat16 of about [-1, 1).
void fill(uint16_t* p, size_t n) {
  uint32_t state = 1;
  for (size_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    p[i] = f32_to_bf16(static_cast<float>(static_cast<int32_t>(state)) / 2147483648.0f);
  }
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int run(int argc, char** argv) {
  if (argc < 8) {
    std::printf("usage: %s ISA THREADS HEADS KV_HEADS HEAD_DIM REPEATS QUERIES:KEYS...\n", argv[0]);
    return 2;
  }
  ThreadPool pool(std::atoi(argv[2]));
  Profiler profiler;
  Context ctx{pool, resolve_isa(argv[1]), profiler};
  AttentionShape shape;
  shape.heads = std::atoi(argv[3]);
  shape.kv_heads = std::atoi(argv[4]);
  shape.k_dim = shape.v_dim = std::atoi(argv[5]);
  shape.scale = 1 / std::sqrt(static_cast<float>(shape.k_dim));
  KvLayout layout;
  layout.dtype = DType::bf16;
  layout.kv_heads = shape.kv_heads;
  layout.k_dim = layout.v_dim = shape.k_dim;

  std::vector<AttentionSeq> seqs;
  int64_t rows = 0;
  int32_t pages = 0;
  for (int i = 7; i < argc; ++i) {
    const char* colon = std::strchr(argv[i], ':');
    const int64_t queries = std::atoll(argv[i]), keys = colon ? std::atoll(colon + 1) : 0;
    if (queries < 1 || keys < queries) {
      std::printf("%s: expected QUERIES:KEYS with 1 <= QUERIES <= KEYS\n", argv[i]);
      return 2;
    }
    seqs.push_back({rows, queries, keys - queries, nullptr});
    rows += queries;
    pages += static_cast<int32_t>((keys + kPageTokens - 1) / kPageTokens);
  }
  std::vector<int32_t> table(pages);
  for (int32_t p = 0; p < pages; ++p) table[p] = p;
  int32_t next = 0;
  for (AttentionSeq& s : seqs) {
    s.pages = table.data() + next;
    next += static_cast<int32_t>((s.kv_begin + s.q_len + kPageTokens - 1) / kPageTokens);
  }
  const size_t page_bytes = layout.layer_bytes();
  HugeBuffer kv(page_bytes * pages);
  fill(kv.as<uint16_t>(), page_bytes * pages / 2);

  const DType q_dtype = attention_q_dtype(ctx, layout.dtype);
  const int64_t q_cols = int64_t{shape.heads} * layout.k_width();
  const int64_t out_cols = int64_t{shape.heads} * shape.v_dim;
  std::vector<float> q(rows * q_cols), out(rows * padded_cols(out_cols));
  if (q_dtype == DType::bf16) {
    fill(reinterpret_cast<uint16_t*>(q.data()), q.size());
  } else {
    for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  }
  const Mat q_mat{q.data(), q_dtype, rows, q_cols, q_cols};
  const Mat out_mat{out.data(), DType::f32, rows, out_cols, padded_cols(out_cols)};
  AttentionScratch scratch;
  double best = 1e30;
  for (int i = 0; i < std::max(1, std::atoi(argv[6])); ++i) {
    const double start = seconds();
    attention(ctx, shape, layout, {kv.data(), page_bytes},
              {seqs.data(), static_cast<int64_t>(seqs.size())}, q_mat, out_mat, scratch);
    best = std::min(best, seconds() - start);
  }
  const uint64_t hash = xxh64(out.data(), out.size() * sizeof(float), 0);
  std::printf("%.3f ms  %016llx\n", best * 1e3, static_cast<unsigned long long>(hash));
  return 0;
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  try {
    return turbomind::run(argc, argv);
  } catch (const turbomind::Error& e) {
    std::printf("%s\n", e.what());
    return 2;
  }
}
