// Time of the CPU's attention in milliseconds per call, and a hash of its result.
//
//   attention_bench ISA THREADS HEADS KV_HEADS HEAD_DIM REPEATS QUERIES:KEYS...
//
// Each QUERIES:KEYS is one sequence of the step: so many queries, the last of so many keys. The
// smallest of REPEATS times is printed. Results with equal hashes have equal bits. Without
// arguments, or with names of cases, it checks that results do not depend on the threads.
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
#include "tests/check.h"

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

struct Result {
  double seconds;  // of the fastest call
  uint64_t hash;   // of the output
};

// One step's sequences, each in pages of its own.
struct Step {
  std::vector<AttentionSeq> seqs;
  std::vector<int32_t> table;
  int64_t rows = 0;

  void add(int64_t queries, int64_t keys) {
    seqs.push_back({rows, queries, keys - queries, nullptr});
    rows += queries;
    const int32_t first = static_cast<int32_t>(table.size());
    for (int64_t k = 0; k < keys; k += kPageTokens)
      table.push_back(first + static_cast<int32_t>(k / kPageTokens));
  }

  void finish() {
    const int32_t* next = table.data();
    for (AttentionSeq& s : seqs) {
      s.pages = next;
      next += (s.kv_begin + s.q_len + kPageTokens - 1) / kPageTokens;
    }
  }
};

AttentionShape shape_of(int heads, int kv_heads, int head_dim) {
  AttentionShape shape;
  shape.heads = heads;
  shape.kv_heads = kv_heads;
  shape.k_dim = shape.v_dim = head_dim;
  shape.scale = 1 / std::sqrt(static_cast<float>(head_dim));
  return shape;
}

Result measure(Isa isa, int threads, const AttentionShape& shape, const Step& step, int repeats) {
  ThreadPool pool(threads);
  Profiler profiler;
  Context ctx{pool, isa, profiler};
  KvLayout layout;
  layout.dtype = DType::bf16;
  layout.kv_heads = shape.kv_heads;
  layout.k_dim = layout.v_dim = shape.k_dim;
  const size_t page_bytes = layout.layer_bytes();
  HugeBuffer kv(page_bytes * step.table.size());
  fill(kv.as<uint16_t>(), page_bytes * step.table.size() / 2);

  const DType q_dtype = attention_q_dtype(ctx, layout.dtype);
  const int64_t q_cols = int64_t{shape.heads} * layout.k_width();
  const int64_t out_cols = int64_t{shape.heads} * shape.v_dim;
  std::vector<float> q(step.rows * q_cols), out(step.rows * padded_cols(out_cols));
  if (q_dtype == DType::bf16) {
    fill(reinterpret_cast<uint16_t*>(q.data()), q.size());
  } else {
    for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  }
  const Mat q_mat{q.data(), q_dtype, step.rows, q_cols, q_cols};
  const Mat out_mat{out.data(), DType::f32, step.rows, out_cols, padded_cols(out_cols)};
  AttentionScratch scratch;
  Result result{1e30, 0};
  for (int i = 0; i < std::max(1, repeats); ++i) {
    const double start = seconds();
    attention(ctx, shape, layout, {kv.data(), page_bytes},
              {step.seqs.data(), static_cast<int64_t>(step.seqs.size())}, q_mat, out_mat, scratch);
    result.seconds = std::min(result.seconds, seconds() - start);
  }
  result.hash = xxh64(out.data(), out.size() * sizeof(float), 0);
  return result;
}

int print_time(int argc, char** argv) {
  if (argc < 8) {
    std::printf("usage: %s ISA THREADS HEADS KV_HEADS HEAD_DIM REPEATS QUERIES:KEYS...\n", argv[0]);
    return 2;
  }
  Step step;
  for (int i = 7; i < argc; ++i) {
    const char* colon = std::strchr(argv[i], ':');
    const int64_t queries = std::atoll(argv[i]), keys = colon ? std::atoll(colon + 1) : 0;
    if (queries < 1 || keys < queries) {
      std::printf("%s: expected QUERIES:KEYS with 1 <= QUERIES <= KEYS\n", argv[i]);
      return 2;
    }
    step.add(queries, keys);
  }
  step.finish();
  const AttentionShape shape = shape_of(std::atoi(argv[3]), std::atoi(argv[4]), std::atoi(argv[5]));
  const Result r =
      measure(resolve_isa(argv[1]), std::atoi(argv[2]), shape, step, std::atoi(argv[6]));
  std::printf("%.3f ms  %016llx\n", r.seconds * 1e3, static_cast<unsigned long long>(r.hash));
  return 0;
}

// A long and a short sequence give equal bits on 1 to 3 threads.
void check_threads(Isa isa) {
  Step step;
  step.add(1, 9000);
  step.add(3, 70);
  step.finish();
  const AttentionShape shape = shape_of(4, 2, 64);
  const uint64_t want = measure(isa, 1, shape, step, 1).hash;
  for (const int threads : {2, 3}) CHECK(measure(isa, threads, shape, step, 1).hash == want);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  try {
    if (argc > 3) return print_time(argc, argv);
    std::vector<TestCase> cases;
    for (const Isa isa : available_isas())
      cases.push_back({isa_name(isa), [isa] { check_threads(isa); }});
    return run_cases(argc, argv, cases);
  } catch (const Error& e) {
    std::printf("%s\n", e.what());
    return 2;
  }
}
