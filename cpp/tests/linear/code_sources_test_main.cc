// Codes of files that are read and packed in pieces: the bits of the matrix that is packed whole.
// What the codes of each format mean is compared with their libraries by tests in Python.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/memory.h"
#include "linear/code_format.h"
#include "linear/codes/block_codes.h"
#include "linear/codes/packed_codes.h"
#include "linear/row_source.h"
#include "model/decoder/weight_reader.h"
#include "tests/check.h"

namespace turbomind {
namespace {

constexpr int64_t kRows = 1040, kCols = 512, kGroup = 64;

// A file of random bytes, none of which makes a float16 that is not finite.
class RandomFile {
 public:
  explicit RandomFile(int64_t bytes) {
    std::mt19937 random(5);
    std::vector<uint8_t> data(bytes);
    for (uint8_t& b : data) b = random() & 0xbf;
    const std::string path =
        std::filesystem::temp_directory_path() / ("code-sources-" + std::to_string(getpid()));
    std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(data.data()), bytes);
    file_ = {path, ::open(path.c_str(), O_RDONLY), 0, bytes};
    std::filesystem::remove(path);
    CHECK(file_.descriptor >= 0);
  }
  ~RandomFile() { ::close(file_.descriptor); }
  // The next bytes of the file.
  SourceFile take(int64_t bytes) {
    SourceFile some = file_;
    some.offset = next_;
    some.bytes = bytes;
    next_ += bytes;
    CHECK(next_ <= file_.bytes);
    return some;
  }

 private:
  SourceFile file_;
  int64_t next_ = 3;  // tensors need no alignment
};

struct Case {
  std::string name;
  std::unique_ptr<CodeSource> source;
  CodeLayout layout;
};

PackedIntegers integers(RandomFile& file, Packing packing, int bits, int64_t n, bool interleaved) {
  const int64_t bytes = packing == Packing::bytes ? kRows * n : kRows * n * bits / 8;
  return {"integers", file.take(bytes), packing, interleaved, n == kCols ? 0u : 0x11111111u};
}

Case packed(RandomFile& file, Packing codes, Packing zeros, int bits, bool groups_first,
            const std::vector<int32_t>& order) {
  CodeLayout layout;
  layout.bits = bits;
  layout.group = 32;  // two of the format have one of the file
  layout.scales = ScaleType::f16;
  layout.offsets = Offsets::zero;
  layout.ordered = !order.empty();
  const bool awq = codes == Packing::outputs_last;
  const PackedIntegers matrix = integers(file, codes, bits, kCols, awq);
  const PackedScales scales{"scales", file.take(kRows * kCols / kGroup * 2), ScaleType::f16,
                            groups_first};
  auto source = std::make_unique<PackedCodes>(
      kRows, kCols, bits, kGroup, matrix, scales, integers(file, zeros, bits, kCols / kGroup, awq),
      ByteSpan{reinterpret_cast<const uint8_t*>(order.data()), int64_t(order.size()) * 4});
  return {"packing " + std::to_string(int(codes)) + " of " + std::to_string(bits) + " bits",
          std::move(source), layout};
}

std::vector<Case> cases(RandomFile& file, const std::vector<int32_t>& order) {
  std::vector<Case> all;
  for (const BlockType& type : block_types()) {
    const SourceFile tensor = file.take(kRows * kCols / type.cols * type.bytes);
    all.push_back({type.name,
                   std::make_unique<BlockCodes>("tensor", type.name, tensor, kRows, kCols),
                   type.layout});
  }
  for (const int bits : {4, 8}) {
    all.push_back(packed(file, Packing::inputs_first, Packing::outputs_last, bits, true, {}));
    all.push_back(packed(file, Packing::inputs_first, Packing::outputs_last, bits, true, order));
    all.push_back(packed(file, Packing::inputs, Packing::outputs, bits, false, {}));
  }
  all.push_back(packed(file, Packing::outputs_last, Packing::outputs_last, 4, true, {}));
  all.push_back(packed(file, Packing::bytes, Packing::bytes, 8, false, {}));
  return all;
}

RowSegment rows_of(const CodeSource& source, int64_t begin, int64_t rows) {
  RowSegment segment{nullptr, DType::f32, begin, rows, kCols};
  segment.codes = &source;
  return segment;
}

// A matrix that is packed in pieces of so many rows.
struct Packed {
  HugeBuffer memory;
  LinearWeight weight;

  Packed(const WeightFormat& format, const std::vector<RowSegment>& segments, int64_t piece)
      : memory(format.packed_bytes(rows(segments), segments[0].cols)) {
    ThreadPool pool(2);
    WeightReader reader;
    const int64_t n = rows(segments), k = segments[0].cols;
    std::memset(memory.data(), 0xff, memory.size());
    format.check(segments, k);
    for (int64_t row = 0; row < n; row += piece) {
      const RowRange range{row, std::min(row + piece, n)};
      const auto some = reader.read(pool, some_rows(segments, row, range.size()));
      format.pack_rows(pool, some, range, n, k, memory.data());
    }
    weight = {&format, n, k, memory.data(), memory.size()};
  }
  static int64_t rows(const std::vector<RowSegment>& segments) {
    int64_t n = 0;
    for (const RowSegment& s : segments) n += s.rows;
    return n;
  }
  std::vector<float> row(int64_t r) const {
    std::vector<float> values(weight.k);
    weight.format->unpack_row(weight, r, values.data());
    return values;
  }
};

void check_rows(const std::string& name, const Packed& whole, const Packed& other,
                const std::vector<RowSegment>& segments, int64_t first_col = 0) {
  int64_t at = 0;
  for (const RowSegment& s : segments)
    for (int64_t r = s.row_begin; r < s.row_begin + s.rows; ++r, ++at)
      CHECK(std::memcmp(whole.row(r).data() + first_col, other.row(at).data(),
                        other.weight.k * sizeof(float)) == 0,
            "%s: row %d", name.c_str(), int(r));
}

template <typename F>
void each_case(F&& f) {
  RandomFile file(40 << 20);
  std::vector<int32_t> order(kCols);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(7));
  for (const Case& c : cases(file, order))
    f(c, Packed(code_format(c.layout), {rows_of(*c.source, 0, kRows)}, kRows));
}

void test_pieces_have_the_bits_of_the_whole() {
  each_case([](const Case& c, const Packed& whole) {
    const Packed pieces(code_format(c.layout), {rows_of(*c.source, 0, kRows)}, kPackRows);
    CHECK(std::memcmp(pieces.memory.data(), whole.memory.data(), whole.memory.size()) == 0, "%s",
          c.name.c_str());
  });
}

// Gates and ups alternate by 16 rows, and borders of fused matrices are anywhere.
void test_rows_in_another_order() {
  each_case([](const Case& c, const Packed& whole) {
    std::vector<RowSegment> alternating;
    for (int64_t r = 0; r + 16 <= kRows / 2; r += 16)
      for (const int64_t first : {int64_t{0}, kRows / 2})
        alternating.push_back(rows_of(*c.source, first + r, 16));
    const std::vector<RowSegment> borders = {
        rows_of(*c.source, 701, 130), rows_of(*c.source, 3, 45), rows_of(*c.source, 50, 600)};
    for (const auto& segments : {alternating, borders})
      check_rows(c.name, whole, Packed(code_format(c.layout), segments, kPackRows), segments);
  });
}

void test_columns_of_pieces() {
  each_case([](const Case& c, const Packed& whole) {
    const WeightFormat& format = code_format(c.layout);
    if (format.column_step() == 0) return;
    const std::vector<RowSegment> segments = {rows_of(*c.source, 16, 600)};
    const Packed part(format, some_columns(segments, kCols / 2, kCols / 2), kPackRows);
    check_rows(c.name, whole, part, segments, kCols / 2);
  });
}

// Values that are made in pieces, as dummy weights are.
void test_made_rows() {
  const std::function<void(int64_t, int64_t, void*)> make = [](int64_t b, int64_t e, void* out) {
    for (int64_t i = b; i < e; ++i) static_cast<float*>(out)[i - b] = static_cast<float>(i);
  };
  RowSegment segment{nullptr, DType::f32, 5, 300, 33};
  segment.make = &make;
  const Packed packed(weight_format("float32"), {segment}, kPackRows);
  for (int64_t r = 0; r < 300; ++r)
    for (int64_t i = 0; i < 33; ++i)
      CHECK(packed.row(r)[i] == static_cast<float>((r + 5) * 33 + i));
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(
      argc, argv,
      {TM_CASE(test_pieces_have_the_bits_of_the_whole), TM_CASE(test_rows_in_another_order),
       TM_CASE(test_columns_of_pieces), TM_CASE(test_made_rows)});
}
