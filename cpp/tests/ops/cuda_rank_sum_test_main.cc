// Sums over ranks, fused with their norm, and joined columns of logits: bit for bit those of loops
// in the ranks' order and of the norm's own kernel. Ranks take turns on one GPU, so that it can be
// a real one ("--gpu"); that their kernels wait for each other is tested by gpu_ranks_test.
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/tensor.h"
#include "cuda/dispatch.h"
#include "ops/norm_kernels.h"
#include "ops/rank_sum_cuda.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"
#include "tests/cuda/gpu_array.h"

namespace turbomind {

TM_GPU_TABLE(NormCuda, kNormCuda, norm_cuda)
TM_GPU_TABLE(RankSumCuda, kRankSumCuda, rank_sum_cuda)

namespace {

std::vector<float> random_floats(size_t n, uint32_t seed) {
  std::mt19937 gen(seed + test_seed);
  std::normal_distribution<float> dist(0, 1);
  std::vector<float> v(n);
  for (float& x : v) x = dist(gen);
  return v;
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct Case {
  int ranks, rows, cols;
  bool add, norm, weight;
  DType dtype;
  float scale;
  int x_stride() const { return cols + 3; }
  int part_stride() const { return static_cast<int>(padded_cols(cols)); }
  std::string name() const {
    return std::to_string(ranks) + " ranks, [" + std::to_string(rows) + ", " +
           std::to_string(cols) + "], " + dtype_name(dtype) + (norm ? ", norm" : "");
  }
};

// In the order of the ranks; other orders give other bits where there are three or more.
std::vector<float> summed(const Case& c, const std::vector<std::vector<float>>& parts,
                          std::vector<float> x) {
  for (int r = 0; r < c.rows; ++r)
    for (int i = 0; i < c.cols; ++i) {
      float sum = parts[0][r * c.part_stride() + i];
      for (int p = 1; p < c.ranks; ++p) sum += parts[p][r * c.part_stride() + i];
      float& at = x[r * c.x_stride() + i];
      at = c.add ? std::fma(c.scale, sum, at) : c.scale * sum;
    }
  return x;
}

void check_sum(Gpu& gpu, const Case& c) {
  const GpuStream stream(gpu);
  std::vector<std::vector<float>> parts;
  std::vector<GpuArray<float>> device_parts;
  DeviceRankSum s;
  for (int r = 0; r < c.ranks; ++r) {
    parts.push_back(random_floats(c.rows * c.part_stride(), 10 * r + c.cols));
    device_parts.emplace_back(gpu, parts[r]);
    s.parts[r] = device_parts[r].data();
  }
  const std::vector<float> x = random_floats(c.rows * c.x_stride(), 7);
  const GpuArray<float> device_x(gpu, x), weight(gpu, random_floats(c.cols, 3));
  const int y_stride = c.part_stride() + 8;
  // Of 32 bits, which 16-bit results do not fill.
  const GpuArray<uint32_t> y(gpu, c.rows * y_stride), want_y(gpu, c.rows * y_stride);
  s.exchange.ranks = c.ranks;
  s.exchange.own = c.ranks - 1;
  s.exchange.waits = false;
  s.part_stride = c.part_stride();
  s.x = device_x.data();
  s.x_stride = c.x_stride();
  s.rows = c.rows, s.cols = c.cols;
  s.scale = c.scale, s.add = c.add;
  DeviceNorm n;
  n.x = device_x.data();
  n.x_stride = c.x_stride();
  n.y = want_y.data();
  n.weight = c.weight ? weight.data() : nullptr;
  n.y_stride = y_stride;
  n.rows = c.rows, n.cols = c.cols, n.padded = c.part_stride();
  n.weight_offset = c.weight ? 1 : 0;
  n.y_dtype = c.dtype;
  if (c.norm) {
    s.norm = n;
    s.norm.y = y.data();
  }
  gpu.make_current();
  rank_sum_cuda(gpu.kind()).sum(stream.handle(), s);
  if (c.norm) norm_cuda(gpu.kind()).rms_norm(stream.handle(), n);
  stream.synchronize();
  CHECK(same_bits(device_x.get(), summed(c, parts, x)), "%s", c.name().c_str());
  CHECK(same_bits(y.get(), want_y.get()), "the norm of %s", c.name().c_str());
}

void test_sums() {
  const auto gpu = open_gpu(kind(), 0);
  for (const int ranks : {2, 3, 8})
    for (const int cols : {7, 100, 896, 5000})
      check_sum(*gpu, {ranks, 3, cols, ranks != 3, false, false, DType::f32, 1.0f});
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
    for (const int cols : {8, 99, 896, 4096, 4100, 5000})
      check_sum(*gpu, {3, 2, cols, cols != 99, true, cols != 896, dtype, 0.22f});
}

// The norm takes the place of the sum.
void test_norm_in_place() {
  const auto gpu = open_gpu(kind(), 0);
  const GpuStream stream(*gpu);
  constexpr int kCols = 100;
  const GpuArray<float> a(*gpu, random_floats(kCols, 1)), b(*gpu, random_floats(kCols, 2));
  const GpuArray<float> x(*gpu, kCols), apart(*gpu, kCols), weight(*gpu, random_floats(kCols, 3));
  DeviceRankSum s;
  s.exchange.ranks = 2;
  s.exchange.waits = false;
  s.parts[0] = a.data(), s.parts[1] = b.data();
  s.part_stride = s.x_stride = s.norm.y_stride = kCols;
  s.rows = s.norm.rows = 1;
  s.cols = s.norm.cols = s.norm.padded = kCols;
  s.norm.weight = weight.data();
  std::vector<std::vector<float>> results;
  for (const GpuArray<float>* y : {&apart, &x}) {
    s.x = x.data();
    s.norm.y = y->data();
    gpu->make_current();
    rank_sum_cuda(gpu->kind()).sum(stream.handle(), s);
    stream.synchronize();
    results.push_back(y->get());
  }
  CHECK(same_bits(results[0], results[1]));
}

// Parts end anywhere, and a rank may have none.
void test_columns() {
  const auto gpu = open_gpu(kind(), 0);
  const GpuStream stream(*gpu);
  for (const std::vector<int>& begin :
       {std::vector<int>{0, 512, 1003}, {0, 256, 256, 3000}, {0, 256, 512, 768, 1001}}) {
    const int ranks = static_cast<int>(begin.size()) - 1, cols = begin.back(), rows = 3;
    std::vector<float> want(rows * (cols + 1), NAN);
    std::vector<GpuArray<float>> parts;
    DeviceRankColumns c;
    c.exchange.ranks = ranks;
    c.exchange.waits = false;
    for (int r = 0; r < ranks; ++r) {
      const int count = begin[r + 1] - begin[r], stride = static_cast<int>(padded_cols(count));
      const std::vector<float> part = random_floats(rows * stride + 1, r);
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < count; ++i)
          want[row * (cols + 1) + begin[r] + i] = part[row * stride + i];
      parts.emplace_back(*gpu, part);
      c.parts[r] = parts.back().data();
      c.part_strides[r] = stride;
      c.begin[r + 1] = begin[r + 1];
    }
    const GpuArray<float> y(*gpu, rows * (cols + 1));
    c.rows = rows;
    c.y_stride = cols + 1;
    gpu->make_current();
    rank_sum_cuda(gpu->kind()).columns(stream.handle(), c);  // a rank without a y stores nothing
    c.y = y.data();
    rank_sum_cuda(gpu->kind()).columns(stream.handle(), c);
    stream.synchronize();
    std::vector<float> got = y.get();
    for (int row = 0; row < rows; ++row) {
      CHECK(std::isnan(got[row * (cols + 1) + cols]), "a column behind the last");
      got[row * (cols + 1) + cols] = want[row * (cols + 1) + cols] = 0;
    }
    CHECK(same_bits(got, want), "%d ranks", ranks);
  }
}

bool refuses(const std::string& text, const DeviceRankSum& s) {
  try {
    rank_sum_cuda(kind()).sum(nullptr, s);
  } catch (const Error& e) {
    return std::string(e.what()).find(text) != std::string::npos;
  }
  return false;
}

void test_what_is_refused() {
  DeviceRankSum s;
  s.exchange.waits = false;
  CHECK(refuses("rank_sum: got rank 0 of 0, expected at most 16", s));
  s.exchange.ranks = 2;
  CHECK(refuses("rank_sum: got [0, 0]", s));
  s.exchange.waits = true;
  CHECK(refuses("got no counters", s));
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(read_arguments(argc, argv), {
                                                   TM_CASE(test_sums),
                                                   TM_CASE(test_norm_in_place),
                                                   TM_CASE(test_columns),
                                                   TM_CASE(test_what_is_refused),
                                               });
}
