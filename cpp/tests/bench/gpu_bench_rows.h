// gpu_bench: ops on rows, the sampler and copies of pages.
#pragma once

#include "cache/page_copy_cuda.h"
#include "cuda/dispatch.h"
#include "ops/embedding_cuda.h"
#include "ops/norm_kernels.h"
#include "ops/rows_cuda.h"
#include "ops/sample_cuda.h"
#include "tests/bench/gpu_bench.h"

namespace turbomind {

TM_GPU_TABLE(NormCuda, kNormCuda, bench_norm_kernels)
TM_GPU_TABLE(EmbeddingCuda, kEmbeddingCuda, bench_embedding_kernels)
TM_GPU_TABLE(RowsCuda, kRowsCuda, bench_rows_kernels)
TM_GPU_TABLE(SampleCuda, kSampleCuda, bench_sample_kernels)

// `take` makes a set of operands, `submit` launches one.
template <typename Take, typename Submit>
void bench_sets(Bench& b, const Figure& figure, const Work& work, Take&& take, Submit&& submit) {
  try {
    b.arena.reset();
    std::vector<decltype(take())> sets;
    const int count = b.sets(work.bytes);
    while (static_cast<int>(sets.size()) < count) sets.push_back(take());
    figure.print(b.measure(count, work, [&](int set) { submit(sets[set]); }), work);
  } catch (const Error& e) {
    figure.print_error(e.what());
  }
}

inline void bench_norm(Bench& b, int rows, int cols) {
  DeviceNorm n;
  n.rows = rows;
  n.cols = n.padded = cols;
  n.x_stride = n.y_stride = cols;
  n.y_dtype = DType::bf16;
  const Work work{static_cast<double>(norm_bytes_loaded(n) + norm_bytes_stored(n)),
                  4.0 * rows * cols};
  bench_sets(
      b, {"rms_norm", "to 16 bits", {{"rows", rows}, {"cols", cols}}, ""}, work,
      [&] {
        n.x = b.arena.take<float>(int64_t{rows} * cols);
        n.y = b.arena.take<uint16_t>(int64_t{rows} * cols);
        n.weight = b.arena.take<float>(cols);
        return n;
      },
      [&](const DeviceNorm& set) {
        bench_norm_kernels(b.gpu.kind()).rms_norm(b.gpu.handle(), set);
      });
}

inline void bench_embedding(Bench& b, int rows, int cols, int vocab) {
  DeviceEmbedding e;
  e.rows = rows;
  e.cols = cols;
  e.vocab = vocab;
  e.table_stride = e.y_stride = cols;
  std::vector<int32_t> ids(rows);
  std::mt19937 rng(5);
  for (int32_t& id : ids) id = static_cast<int32_t>(rng() % static_cast<unsigned>(vocab));
  const Work work{6.0 * rows * cols, 1.0 * rows * cols};
  bench_sets(
      b, {"embedding", "", {{"rows", rows}, {"cols", cols}, {"vocab", vocab}}, ""}, work,
      [&] {
        if (e.table == nullptr) e.table = b.arena.take<uint16_t>(int64_t{vocab} * cols);
        for (int32_t& id : ids) id = static_cast<int32_t>(rng() % static_cast<unsigned>(vocab));
        e.ids = b.arena.put(ids);
        e.y = b.arena.take<float>(int64_t{rows} * cols);
        return e;
      },
      [&](const DeviceEmbedding& set) {
        bench_embedding_kernels(b.gpu.kind()).embed(b.gpu.handle(), set);
      });
}

// The rows whose logits are computed, 16-bit.
inline void bench_gather(Bench& b, int rows, int cols) {
  std::vector<int32_t> of(rows);
  for (int i = 0; i < rows; ++i) of[i] = rows - 1 - i;
  const Work work{4.0 * rows * cols, 0};
  bench_sets(
      b, {"gather", "16 bits", {{"rows", rows}, {"cols", cols}}, ""}, work,
      [&] {
        DeviceGather g;
        g.x = b.arena.take<uint16_t>(int64_t{rows} * cols);
        g.y = b.arena.take<uint16_t>(int64_t{rows} * cols);
        g.rows = b.arena.put(of);
        g.x_stride = g.y_stride = int64_t{2} * cols;
        g.row_bytes = 2 * cols;
        g.count = rows;
        return g;
      },
      [&](const DeviceGather& set) {
        bench_rows_kernels(b.gpu.kind()).gather(b.gpu.handle(), set);
      });
}

inline void bench_elementwise(Bench& b, int rows, int cols) {
  const double values = 1.0 * rows * cols;
  bench_sets(
      b, {"scaled_add", "", {{"rows", rows}, {"cols", cols}}, ""}, {12 * values, 2 * values},
      [&] {
        return DeviceScaledAdd{b.arena.take<float>(int64_t{rows} * cols),
                               b.arena.take<float>(int64_t{rows} * cols),
                               cols,
                               cols,
                               rows,
                               cols,
                               0.001f};
      },
      [&](const DeviceScaledAdd& set) {
        bench_rows_kernels(b.gpu.kind()).scaled_add(b.gpu.handle(), set);
      });
  bench_sets(
      b, {"softcap", "", {{"rows", rows}, {"cols", cols}}, ""}, {8 * values, values},
      [&] {
        return DeviceScaleCap{
            b.arena.take<float>(int64_t{rows} * cols), cols, rows, cols, 1.0f, 30.0f};
      },
      [&](const DeviceScaleCap& set) {
        bench_rows_kernels(b.gpu.kind()).scale_and_cap(b.gpu.handle(), set);
      });
}

inline void bench_sample(Bench& b, int rows, int vocab, bool greedy) {
  std::vector<SampleRow> jobs(rows);
  for (int i = 0; i < rows; ++i) {
    jobs[i].logits_row = jobs[i].out = i;
    jobs[i].temperature = greedy ? 0.0f : 0.7f;
    if (!greedy) jobs[i].top_k = 50, jobs[i].top_p = 0.9f;
    jobs[i].uniform = uint64_t{0x123456789} * (i + 1);
  }
  const Work work{4.0 * rows * vocab, 0};
  bench_sets(
      b,
      {"sample", greedy ? "greedy" : "top-k 50, top-p 0.9", {{"rows", rows}, {"vocab", vocab}}, ""},
      work,
      [&] {
        DeviceSampling s;
        s.stride = (vocab + 3) / 4 * 4;
        s.logits = b.arena.take<float>(rows * s.stride);
        s.vocab = vocab;
        s.num_rows = rows;
        s.rows = b.arena.put(jobs);
        s.tokens = b.arena.take<int32_t>(rows);
        s.scratch = b.arena.put(std::vector<SampleScratch>(rows));
        s.spread = sample_spread(rows, vocab, b.gpu.gpu().info().multiprocessors);
        s.needs = sample_needs(jobs.data(), rows);
        return s;
      },
      [&](const DeviceSampling& set) {
        bench_sample_kernels(b.gpu.kind()).sample(b.gpu.handle(), set);
      });
}

inline void bench_page_copy(Bench& b, int pages, int64_t page_bytes) {
  std::vector<int32_t> from, to;
  for (int i = 0; i < pages; ++i) from.push_back(2 * i), to.push_back(2 * i + 1);
  const double bytes = 2.0 * pages * static_cast<double>(page_bytes);
  bench_sets(
      b, {"copy_pages", "", {{"pages", pages}, {"page_bytes", page_bytes}}, ""}, {bytes, 0},
      [&] { return b.arena.take<uint8_t>(2 * pages * page_bytes); },
      [&](uint8_t* base) {
        copy_pages(b.gpu.kind(), b.gpu.handle(), base, page_bytes, from.data(), to.data(), pages);
      });
}

inline void bench_rows(Bench& b) {
  const int cols = b.quick ? 96 : 4096, vocab = b.quick ? 1000 : 128256;
  const std::vector<int> all = b.quick ? std::vector<int>{3} : std::vector<int>{1, 64, 2048};
  for (const int rows : all) bench_norm(b, rows, cols);
  bench_embedding(b, all.back(), cols, vocab);
  bench_gather(b, b.quick ? 3 : 64, cols);
  bench_elementwise(b, all.back(), cols);
  for (const bool greedy : {true, false})
    for (const int rows : b.quick ? std::vector<int>{2} : std::vector<int>{1, 16, 64})
      bench_sample(b, rows, vocab, greedy);
  bench_page_copy(b, b.quick ? 2 : 32, b.quick ? 4096 : int64_t{8} << 20);
}

}  // namespace turbomind
