// The values of exchanges of ranks on two and three emulated GPUs, and in streams of one: sums
// against loops in float32, norms against doubles and, bit for bit, against the norm's own kernel.
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <string>

#include "core/error.h"
#include "cuda/emulator.h"
#include "tests/check.h"
#include "tests/ops/gpu_ranks.h"

namespace turbomind {
namespace {

constexpr float kPoison = -77;
constexpr float kEps = 1e-5f;

bool throws(const std::string& text, const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return std::string(e.what()).find(text) != std::string::npos;
  }
  return false;
}

std::vector<float> random_floats(size_t n, uint32_t seed) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> dist(0, 1.5f);
  std::vector<float> v(n);
  for (float& x : v) x = dist(gen);
  return v;
}

struct SumCase {
  int rows, cols;
  bool add, weight;
  DType dtype;
  int part_stride() const { return cols + 4 + cols % 3; }
  int x_stride() const { return cols + 5 - cols % 2; }
  int padded() const { return (cols + 31) / 32 * 32; }
  int y_stride() const { return padded() + 3; }
  float scale() const { return add ? 0.75f : 1.25f; }
  std::string name() const {
    return std::to_string(rows) + " x " + std::to_string(cols) + " " + dtype_name(dtype) +
           (add ? " add" : "") + (weight ? "" : " converted");
  }
};

// Element i of a result of any type.
double element(DType t, const std::vector<uint16_t>& bits, size_t i) {
  if (t != DType::f32) return t == DType::bf16 ? bf16_to_f32(bits[i]) : f16_to_f32(bits[i]);
  float v;
  std::memcpy(&v, &bits[2 * i], sizeof v);
  return v;
}

// What the ranks compute with, on the host.
struct SumData {
  SumData(const SumCase& c, int ranks) : x(random_floats(size_t(c.rows) * c.x_stride(), 50)) {
    weight = random_floats(c.cols, 51);
    for (int r = 0; r < ranks; ++r)
      parts.push_back(random_floats(size_t(c.rows) * c.part_stride(), 60 + r));
  }
  // The sum in the order of the ranks; what is after the columns stays.
  std::vector<float> expected(const SumCase& c) const {
    std::vector<float> out = x;
    for (int row = 0; row < c.rows; ++row)
      for (int i = 0; i < c.cols; ++i) {
        float sum = parts[0][size_t(row) * c.part_stride() + i];
        for (size_t r = 1; r < parts.size(); ++r)
          sum += parts[r][size_t(row) * c.part_stride() + i];
        float& v = out[size_t(row) * c.x_stride() + i];
        v = c.add ? std::fma(c.scale(), sum, v) : c.scale() * sum;
      }
    return out;
  }

  std::vector<float> x, weight;
  std::vector<std::vector<float>> parts;
};

// A rank's arrays.
struct SumArrays {
  SumArrays(TestRank& rank, const SumCase& c, const SumData& data, int r)
      : x(rank.gpu, data.x),
        weight(rank.gpu, data.weight),
        y(rank.gpu, size_t(c.rows) * c.y_stride() * dtype_bytes(c.dtype) / 2),
        plain_y(rank.gpu, size_t(c.rows) * c.y_stride() * dtype_bytes(c.dtype) / 2),
        source(pinned(rank.gpu, data.parts[r])) {}

  DeviceNorm norm(const SumCase& c, void* to) const {
    DeviceNorm n;
    n.y = to;
    if (c.weight) n.weight = weight.data();
    n.y_stride = c.y_stride();
    n.rows = c.rows;
    n.cols = c.cols;
    n.padded = c.padded();
    n.weight_offset = c.weight ? 1 : 0;
    n.eps = kEps;
    n.y_dtype = c.dtype;
    return n;
  }

  GpuArray<float> x, weight;
  GpuArray<uint16_t> y, plain_y;
  PinnedBuffer source;
};

DeviceRankSum rank_sum(TestRanks& ranks, int r, uint32_t number, const SumCase& c, float* x) {
  DeviceRankSum s;
  s.exchange = ranks.exchange(r, number);
  for (int i = 0; i < ranks.size(); ++i) s.parts[i] = ranks[i].parts[number % 2];
  s.part_stride = c.part_stride();
  s.x = x;
  s.x_stride = c.x_stride();
  s.rows = c.rows;
  s.cols = c.cols;
  s.scale = c.scale();
  s.add = c.add;
  return s;
}

void check_norm(const SumCase& c, const std::vector<float>& x, const SumData& data,
                const std::vector<uint16_t>& y) {
  const double half_ulp = c.dtype == DType::f32    ? 0x1p-24
                          : c.dtype == DType::bf16 ? 0x1p-8
                                                   : 0x1p-11;
  for (int row = 0; row < c.rows; ++row) {
    const float* v = x.data() + size_t(row) * c.x_stride();
    double squares = 0;
    for (int i = 0; i < c.cols; ++i) squares += double(v[i]) * v[i];
    const double factor = c.weight ? 1 / std::sqrt(squares / c.cols + double(kEps)) : 1;
    for (int i = 0; i < c.padded(); ++i) {
      const double weight = c.weight && i < c.cols ? double(data.weight[i]) + 1 : 1;
      const double want = i < c.cols ? v[i] * factor * weight : 0;
      const double got = element(c.dtype, y, size_t(row) * c.y_stride() + i);
      CHECK(std::fabs(got - want) <= (half_ulp * 1.001 + 1e-6) * std::fabs(want) + 1e-7,
            "%s: row %d column %d is %g, expected %g", c.name().c_str(), row, i, got, want);
    }
    const size_t words = dtype_bytes(c.dtype) / 2, end = size_t(row + 1) * c.y_stride() * words;
    for (size_t i = end - words * size_t(c.y_stride() - c.padded()); i < end; ++i)
      CHECK(y[i] == 0xffff, "%s: wrote after the padding", c.name().c_str());
  }
}

// The sum with its norm, and the norm's own kernel on what the sum has stored.
void check_sum(TestRanks& ranks, const SumCase& c) {
  const SumData data(c, ranks.size());
  std::vector<std::unique_ptr<SumArrays>> arrays;
  for (int r = 0; r < ranks.size(); ++r)
    arrays.push_back(std::make_unique<SumArrays>(ranks[r], c, data, r));
  ranks.set_counters(0);
  for (int r = 0; r < ranks.size(); ++r)
    ranks[r].copy(ranks[r].parts[1], arrays[r]->source.data(), data.parts[r].size() * 4);
  for (int r = 0; r < ranks.size(); ++r) {
    SumArrays& a = *arrays[r];
    DeviceRankSum s = rank_sum(ranks, r, 1, c, a.x.data());
    s.norm = a.norm(c, a.y.data());
    ranks.sum(r, s);
    DeviceNorm n = a.norm(c, a.plain_y.data());
    n.x = a.x.data();
    n.x_stride = c.x_stride();
    ranks.norm(r, n);
  }
  ranks.synchronize();
  const std::vector<float> expected = data.expected(c);
  for (int r = 0; r < ranks.size(); ++r) {
    const std::vector<float> x = arrays[r]->x.get();
    CHECK(std::memcmp(x.data(), expected.data(), x.size() * 4) == 0, "%s: rank %d, a wrong sum",
          c.name().c_str(), r);
    const std::vector<uint16_t> y = arrays[r]->y.get();
    CHECK(y == arrays[r]->plain_y.get(), "%s: rank %d, other bits than those of the norm's kernel",
          c.name().c_str(), r);
    check_norm(c, x, data, y);
  }
}

// x without a norm, and x normed in place where the row has room for its padding.
void check_plain_and_in_place(TestRanks& ranks, SumCase c) {
  const SumData data(c, ranks.size());
  std::vector<std::unique_ptr<SumArrays>> arrays;
  for (int r = 0; r < ranks.size(); ++r)
    arrays.push_back(std::make_unique<SumArrays>(ranks[r], c, data, r));
  for (const bool in_place : {false, true}) {
    if (in_place && c.cols > kMaxNormCols) continue;
    ranks.set_counters(0);
    for (int r = 0; r < ranks.size(); ++r) {
      arrays[r]->x.set(data.x);
      ranks[r].copy(ranks[r].parts[1], arrays[r]->source.data(), data.parts[r].size() * 4);
    }
    for (int r = 0; r < ranks.size(); ++r) {
      SumArrays& a = *arrays[r];
      DeviceRankSum s = rank_sum(ranks, r, 1, c, a.x.data());
      if (in_place) {
        s.norm = a.norm(c, a.x.data());
        s.norm.y_stride = c.x_stride();
        s.norm.padded = c.cols + 1;
      }
      ranks.sum(r, s);
      if (in_place) continue;
      if (c.cols > kMaxNormCols) continue;
      DeviceNorm n = a.norm(c, a.plain_y.data());
      n.x = a.x.data();
      n.x_stride = c.x_stride();
      ranks.norm(r, n);
    }
    ranks.synchronize();
    std::vector<float> expected = data.expected(c);
    for (int r = 0; r < ranks.size(); ++r) {
      if (in_place)
        for (int row = 0; row < c.rows; ++row) {
          float* const to = expected.data() + size_t(row) * c.x_stride();
          const std::vector<uint16_t> y = arrays[r]->plain_y.get();
          std::memcpy(to, y.data() + 2 * size_t(row) * c.y_stride(), size_t(c.cols) * 4);
          to[c.cols] = 0;
        }
      const std::vector<float> x = arrays[r]->x.get();
      CHECK(std::memcmp(x.data(), expected.data(), x.size() * 4) == 0, "%s: rank %d, wrong %s",
            c.name().c_str(), r, in_place ? "in place" : "without a norm");
    }
  }
}

void check_sums(int count, Place place) {
  TestRanks ranks(count, place, 5 * 9000);
  uint64_t seed = 0;
  for (const int cols : {8, 100, 896, 4096, 5000})
    for (const int rows : {1, 5})
      for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
        emulator::set_schedule_seed(++seed);
        const bool add = (seed + count) % 2 == 0;
        check_sum(ranks, {rows, cols, add, true, t});
      }
  for (const DType t : {DType::f32, DType::bf16, DType::f16}) {
    check_sum(ranks, {2, 99, false, false, t});
    check_sum(ranks, {1, 4100, true, false, t});
  }
  for (const int cols : {7, 896, 4097, 8960})
    check_plain_and_in_place(ranks, {3, cols, cols % 2 == 0, true, DType::f32});
  CHECK(ranks.stop() == 0);
  for (int r = 0; r < count; ++r) CHECK(ranks.missing(r) == 0);
}

void test_one_stream() {
  check_sums(1, Place::one_stream);
  check_sums(2, Place::one_stream);
  check_sums(5, Place::one_stream);  // more than a thread loads at once
}

void test_any_width_without_norm() {
  TestRanks ranks(2, Place::one_stream, 60000);
  check_plain_and_in_place(ranks, {2, kMaxNormCols + 5, true, true, DType::f32});
}

void test_peers() {
  check_sums(2, Place::peers);
  check_sums(3, Place::peers);
}

void test_pinned() {
  check_sums(2, Place::pinned);
  check_sums(3, Place::pinned);
}

void test_streams() {
  check_sums(3, Place::streams);
}

// Blocks interleave and see each other's stores late.
void test_blocks_at_once() {
  emulator::run_blocks_at_once(4);
  check_sums(3, Place::peers);
  emulator::run_blocks_at_once(0);
}

// ---- Columns.

// Each rank has columns begin[r] to begin[r + 1]; those whose bit is set in `readers` have a y.
void check_columns(TestRanks& ranks, const std::vector<int>& begin, int rows, unsigned readers) {
  const int count = ranks.size(), cols = begin.back(), y_stride = cols + 5;
  ranks.set_counters(0);
  const std::vector<float> logits = random_floats(size_t(rows) * cols, 70);
  std::vector<PinnedBuffer> sources;
  std::vector<std::unique_ptr<GpuArray<float>>> y;
  DeviceRankColumns c;
  for (int r = 0; r < count; ++r) {
    const int own = begin[r + 1] - begin[r], stride = own + r;
    std::vector<float> part(size_t(rows) * stride + 1, kPoison);
    for (int row = 0; row < rows; ++row)
      std::copy_n(logits.begin() + size_t(row) * cols + begin[r], own,
                  part.begin() + size_t(row) * stride);
    sources.push_back(pinned(ranks[r].gpu, part));
    y.push_back(std::make_unique<GpuArray<float>>(
        ranks[r].gpu, std::vector<float>(size_t(rows) * y_stride, kPoison)));
    c.begin[r + 1] = begin[r + 1];
    c.part_strides[r] = stride;
    if (own > 0) c.parts[r] = ranks[r].parts[1];
  }
  c.y_stride = y_stride;
  c.rows = rows;
  for (int r = 0; r < count; ++r)
    ranks[r].copy(ranks[r].parts[1], sources[r].data(), sources[r].size());
  for (int r = 0; r < count; ++r) {
    c.exchange = ranks.exchange(r, 1);
    c.y = (readers >> r & 1u) != 0 ? y[r]->data() : nullptr;
    ranks.columns(r, c);
  }
  ranks.synchronize();
  for (int r = 0; r < count; ++r) {
    const bool reads = (readers >> r & 1u) != 0;
    const std::vector<float> got = y[r]->get();
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < y_stride; ++i)
        CHECK(got[size_t(row) * y_stride + i] ==
                  (reads && i < cols ? logits[size_t(row) * cols + i] : kPoison),
              "%d ranks, rank %d of %d columns: row %d, column %d", count, r, cols, row, i);
  }
}

void check_all_columns(Place place) {
  uint64_t seed = 0;
  TestRanks two(2, place, 5 * 9000), three(3, place, 5 * 9000);
  for (const int rows : {1, 5})
    for (const unsigned readers : {1u, 7u, 4u, 0u}) {
      emulator::set_schedule_seed(++seed);
      check_columns(two, {0, 512, 1003}, rows, readers);
      check_columns(three, {0, 352, 704, 1003}, rows, readers);
      check_columns(three, {0, 512, 1003, 1003}, rows, readers);  // ranks without columns
      check_columns(three, {0, 0, 1003, 1003}, rows, readers);
      check_columns(three, {0, 512, 512, 1003}, rows, readers);
      check_columns(two, {0, 4512, 9001}, rows, readers);  // blocks with columns of two ranks
      check_columns(three, {0, 4096, 8192, 12290}, 1, readers);
    }
}

void test_columns_in_one_stream() {
  check_all_columns(Place::one_stream);
}

void test_columns_of_peers() {
  check_all_columns(Place::peers);
  check_all_columns(Place::pinned);
}

void test_columns_of_streams() {
  check_all_columns(Place::streams);
}

// ---- Sizes out of range.

void test_refused_sums() {
  TestRanks ranks(2, Place::one_stream, 256);
  const GpuArray<float> x(ranks[0].gpu, 1024);
  const SumCase small{2, 8, true, true, DType::f32};
  const auto refused = [&](const char* text, const std::function<void(DeviceRankSum&)>& change) {
    DeviceRankSum s = rank_sum(ranks, 0, 1, small, x.data());
    s.norm.y = x.data();
    s.norm.rows = small.rows;
    s.norm.cols = s.norm.padded = small.cols;
    s.norm.y_stride = 16;
    change(s);
    CHECK(throws(text, [&] { ranks.sum(0, s); }), "%s", text);
  };
  refused("got rank 0 of 17, expected at most 16", [](auto& s) { s.exchange.ranks = 17; });
  refused("got rank 2 of 2", [](auto& s) { s.exchange.own = 2; });
  refused("got rank -1 of 2", [](auto& s) { s.exchange.own = -1; });
  refused("got no counters", [](auto& s) { s.exchange.waits = true; });
  refused("got no counters", [&](auto& s) {  // of the second rank
    s.exchange.waits = true;
    s.exchange.counters[0] = s.exchange.stop = s.exchange.missing = ranks[0].counter;
    s.exchange.base = ranks[0].counter;
  });
  refused("got [2, 0]", [](auto& s) { s.cols = 0; });
  refused("with strides 7 and", [](auto& s) { s.part_stride = 7; });
  refused("and 7 and a norm", [](auto& s) { s.x_stride = 7; });
  refused("a norm of [3, 8]", [](auto& s) { s.norm.rows = 3; });
  refused("a norm of [2, 9]", [](auto& s) { s.norm.cols = 9; });
  refused("padded to 7", [](auto& s) { s.norm.padded = 7; });
  refused("padded to 8 with stride 7", [](auto& s) { s.norm.y_stride = 7; });
  refused("a norm of at most 24576 columns", [](auto& s) {
    s.cols = s.norm.cols = s.norm.padded = kMaxNormCols + 1;
    s.part_stride = s.x_stride = s.norm.y_stride = s.cols;
  });
}

void test_refused_columns() {
  TestRanks ranks(2, Place::one_stream, 256);
  const GpuArray<float> y(ranks[0].gpu, 1024);
  const auto refused = [&](const char* text,
                           const std::function<void(DeviceRankColumns&)>& change) {
    DeviceRankColumns c;
    c.exchange = ranks.exchange(0, 1);
    c.begin[1] = 32;
    c.begin[2] = 40;
    c.part_strides[0] = c.part_strides[1] = 32;
    c.y = y.data();
    c.y_stride = 64;
    c.rows = 1;
    change(c);
    CHECK(throws(text, [&] { ranks.columns(0, c); }), "%s", text);
  };
  refused("rank 1 has -8 columns", [](auto& c) {
    c.begin[1] = 48;
    c.part_strides[0] = 48;
  });
  refused("rank 0 has 32 columns with stride 31", [](auto& c) { c.part_strides[0] = 31; });
  refused("1 rows with stride 39, expected at least 1 of 40", [](auto& c) { c.y_stride = 39; });
  refused("0 rows", [](auto& c) { c.rows = 0; });
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv,
                   {TM_CASE(test_one_stream), TM_CASE(test_any_width_without_norm),
                    TM_CASE(test_peers), TM_CASE(test_pinned), TM_CASE(test_streams),
                    TM_CASE(test_blocks_at_once), TM_CASE(test_columns_in_one_stream),
                    TM_CASE(test_columns_of_peers), TM_CASE(test_columns_of_streams),
                    TM_CASE(test_refused_sums), TM_CASE(test_refused_columns)});
}
