// How products are laid out over caches: no arithmetic.
#include <algorithm>
#include <vector>

#include "linear/weight_format.h"
#include "tests/check.h"

namespace turbomind {
namespace {

// A first-level cache: 64 sets of lines of 64 bytes (48 KiB have 12 ways, 32 KiB have 8).
constexpr int kSets = 64, kLine = 64;

// Lines per set of `lines` neighbouring lines of each of `rows` rows.
std::vector<int> lines_per_set(int64_t stride_bytes, int rows, int lines) {
  std::vector<int> count(kSets);
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < lines; ++i) ++count[(r * stride_bytes / kLine + i) % kSets];
  return count;
}

void test_activation_rows_spread_over_the_cache() {
  for (const int64_t cols : {64, 896, 2048, 3072, 4096, 4864, 5120, 8192, 14336}) {
    const int64_t bytes = activation_stride(cols) * 2;
    CHECK(activation_stride(cols) >= padded_cols(cols) && bytes % kLine == 0);
    const auto tile = lines_per_set(bytes, 16, 1);
    const auto used = kSets - std::count(tile.begin(), tile.end(), 0);
    CHECK(used >= 8, "%d columns: the 16 rows of a tile meet in %d sets", int(cols), int(used));
    // 32 rows of a chunk of 8 K blocks are 256 lines: at best 4 in every set.
    const auto block = lines_per_set(bytes, 32, 8);
    const int most = *std::max_element(block.begin(), block.end());
    CHECK(most == 4, "%d columns: %d lines of a block of rows in one set", int(cols), most);
  }
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(argc, argv, {TM_CASE(test_activation_rows_spread_over_the_cache)});
}
