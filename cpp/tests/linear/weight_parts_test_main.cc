// Parts of a weight, as ranks have them: columns and rows that are packed for themselves, and
// products that write some columns of a whole result.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/memory.h"
#include "linear/row_source.h"
#include "model/decoder/weight_reader.h"
#include "ops/linear.h"
#include "tests/check.h"
#include "tests/linear/random_codes.h"

namespace turbomind {
namespace {

// A matrix packed from segments, and its values.
struct Packed {
  HugeBuffer memory;
  LinearWeight weight;

  Packed(const WeightFormat& format, const std::vector<RowSegment>& segments, int64_t n, int64_t k)
      : memory(format.packed_bytes(n, k)) {
    ThreadPool pool(2);
    std::memset(memory.data(), 0xff, memory.size());
    format.pack(pool, segments, n, k, memory.data());
    weight = {&format, n, k, memory.data(), memory.size()};
  }
  std::vector<float> row(int64_t r) const {
    std::vector<float> values(weight.k);
    weight.format->unpack_row(weight, r, values.data());
    return values;
  }
};

std::vector<float> random_floats(int64_t count) {
  std::mt19937 random(static_cast<uint32_t>(count));
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(count);
  for (float& v : values) v = uniform(random);
  return values;
}

// Cuts the columns of a source at `borders` and compares each part with the whole.
void check_columns(const WeightFormat& format, const std::vector<RowSegment>& source, int64_t n,
                   int64_t k, const std::vector<int64_t>& borders) {
  const Packed whole(format, source, n, k);
  for (size_t i = 0; i + 1 < borders.size(); ++i) {
    const int64_t begin = borders[i], count = borders[i + 1] - begin;
    const std::vector<RowSegment> columns = some_columns(source, begin, count);
    format.check(columns, count);
    const Packed part(format, columns, n, count);
    for (int64_t r = 0; r < n; ++r) {
      const std::vector<float> all = whole.row(r), got = part.row(r);
      CHECK(std::memcmp(got.data(), all.data() + begin, count * sizeof(float)) == 0,
            "%s: row %d of columns from %d", format.name(), int(r), int(begin));
    }
  }
}

void test_columns_of_values() {
  constexpr int64_t kRows = 37, kCols = 150;
  const std::vector<float> values = random_floats(kRows * kCols);
  for (const char* name : {"bfloat16", "float16", "float32"})
    check_columns(weight_format(name), {{values.data(), DType::f32, 0, kRows, kCols}}, kRows, kCols,
                  {0, 1, 50, 83, 150});
}

void test_columns_of_codes() {
  std::mt19937 random(3);
  constexpr int64_t kRows = 21, kCols = 1024;
  for (const CodeLayout& layout : code_layouts()) {
    const WeightFormat& format = code_format(layout);
    RandomCodes codes(layout, kRows, kCols, random);
    const std::vector<RowSegment> source = {
        {nullptr, DType::f32, 0, kRows, kCols, nullptr, &codes.rows}};
    const int64_t step = format.column_step();
    CHECK((step == 0) == layout.ordered, "%s", format.name());
    if (step == 0) continue;
    check_columns(format, source, kRows, kCols, {0, 256, 512, 1024});
    check_columns(format, source, kRows, kCols, {0, 3 * step, 4 * step});
    if (step == 1) continue;
    try {
      format.check(some_columns(source, step / 2, step), step);
      CHECK(false, "%s was cut inside a group", format.name());
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::internal);
    }
  }
}

// Four-bit codes with two in a byte, from an odd column on.
void test_columns_of_half_bytes() {
  CodeLayout layout;
  layout.bits = 4;
  layout.row_scales = true;
  constexpr int64_t kRows = 5, kCols = 31;
  std::vector<uint8_t> halves(kRows * 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint8_t>(i * 37);
  const std::vector<float> scales = random_floats(kRows);
  CodeRows rows;
  rows.rows = kRows;
  rows.cols = kCols;
  rows.code_bits = 4;
  rows.codes = {halves.data(), static_cast<int64_t>(halves.size())};
  rows.scales = {reinterpret_cast<const uint8_t*>(scales.data()), kRows * 4};
  check_columns(code_format(layout), {{nullptr, DType::f32, 0, kRows, kCols, nullptr, &rows}},
                kRows, kCols, {0, 7, 20, 31});
}

void test_rows_of_parts() {
  const WeightFormat& int8 = weight_format("int8");
  const WeightFormat& bf16 = weight_format("bfloat16");
  const WeightFormat& whole = parts_format({{64, &int8}, {32, &bf16}});
  using Name = std::string;
  CHECK(&bf16.of_rows({{3, 5}}) == &bf16);
  CHECK(&whole.of_rows({{0, 64}}) == &int8);
  CHECK(&whole.of_rows({{64, 80}, {90, 96}}) == &bf16);
  CHECK(whole.of_rows({{32, 64}, {80, 96}}).name() == Name("32 int8 + 16 bfloat16"));
  CHECK(whole.of_rows({{60, 70}, {70, 71}}).name() == Name("4 int8 + 7 bfloat16"));
}

// Rows of a file, of which a part of the columns is asked for.
void test_columns_of_a_file() {
  constexpr int64_t kRows = 20, kCols = 33;
  const std::vector<float> values = random_floats(kRows * kCols);
  const std::string path =
      std::filesystem::temp_directory_path() / ("weight-parts-" + std::to_string(getpid()));
  std::ofstream(path, std::ios::binary)
      .write("head", 4)
      .write(reinterpret_cast<const char*>(values.data()), kRows * kCols * 4);
  SourceFile file{path, ::open(path.c_str(), O_RDONLY), 4, kRows * kCols * 4};
  std::filesystem::remove(path);
  CHECK(file.descriptor >= 0);
  const RowSegment all{nullptr, DType::f32, 6, 9, kCols, &file};
  ThreadPool pool(2);
  WeightReader reader;
  const Packed part(weight_format("float32"), reader.read(pool, some_columns({all}, 5, 17)), 9, 17);
  for (int64_t r = 0; r < 9; ++r)
    CHECK(std::memcmp(part.row(r).data(), &values[(6 + r) * kCols + 5], 17 * 4) == 0);
  ::close(file.descriptor);
}

// Ranks write their columns of rows that follow each other without padding: 1003 is odd, so zeros
// after the last column would be the first of the next row.
void test_products_of_a_vocabulary() {
  constexpr int64_t kVocab = 1003, kHidden = 64, kTokens = 5;
  const std::vector<float> values = random_floats(kVocab * kHidden),
                           x_values = random_floats(kTokens * kHidden);
  ThreadPool pool(2);
  Profiler profiler;
  for (const Isa isa : available_isas()) {
    Context ctx{pool, isa, profiler};
    for (const char* name : {"float32", "bfloat16", "int8"}) {
      const WeightFormat& format = weight_format(name);
      const Packed whole(format, {{values.data(), DType::f32, 0, kVocab, kHidden}}, kVocab,
                         kHidden);
      const Mat x{const_cast<float*>(x_values.data()), DType::f32, kTokens, kHidden, kHidden};
      std::vector<float> want(kTokens * kVocab), got(want.size() + 64, 7.0f);
      linear(ctx, Op::head, whole.weight, x, {want.data(), DType::f32, kTokens, kVocab, kVocab});
      // The last part first: what it writes beyond its columns would stay.
      for (const int64_t begin : {768, 512, 256, 0}) {
        LinearWeight part = whole.weight;
        part.data += format.packed_bytes(begin, kHidden);
        part.n = std::min<int64_t>(256, kVocab - begin);
        linear(ctx, Op::head, part, x, {got.data(), DType::f32, kTokens, kVocab, kVocab},
               {.part = true, .first_col = begin});
        CHECK(got[kTokens * kVocab] == 7.0f, "%s", name);
      }
      CHECK(std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) == 0, "%s on %s",
            name, isa_name(isa));
    }
  }
}

void test_a_part_must_fit() {
  const std::vector<float> values = random_floats(32 * 32);
  const Packed w(weight_format("float32"), {{values.data(), DType::f32, 0, 32, 32}}, 32, 32);
  std::vector<float> x(32), y(48);
  ThreadPool pool(1);
  Profiler profiler;
  Context ctx{pool, Isa::portable, profiler};
  const Mat x_mat{x.data(), DType::f32, 1, 32, 32}, y_mat{y.data(), DType::f32, 1, 48, 48};
  for (const LinearArgs& args : {LinearArgs{}, LinearArgs{.part = true, .first_col = 17}}) {
    try {
      linear(ctx, Op::head, w.weight, x_mat, y_mat, args);
      CHECK(false, "a product beyond its result");
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::internal);
    }
  }
  linear(ctx, Op::head, w.weight, x_mat, y_mat, {.part = true, .first_col = 16});
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv,
                   {TM_CASE(test_columns_of_values), TM_CASE(test_columns_of_codes),
                    TM_CASE(test_columns_of_half_bytes), TM_CASE(test_rows_of_parts),
                    TM_CASE(test_columns_of_a_file), TM_CASE(test_products_of_a_vocabulary),
                    TM_CASE(test_a_part_must_fit)});
}
