// How products are laid out over caches: no arithmetic.
#include <algorithm>
#include <vector>

#include "linear/linear_split.h"
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

// ---- the split of few rows ----

// A kernel of 6 rows by 4 panels, as AVX512-BF16 has.
LinearKernel four_panels() {
  LinearKernel kernel;
  kernel.block_rows = 6;
  kernel.block_panels = kernel.piece_panels = 4;
  kernel.chunk_k_blocks = 64;
  return kernel;
}

// An equal share of the panels over what the busiest worker of `threads` computes.
double efficiency(int64_t m, int64_t n, int64_t k, Epilogue epilogue, int threads) {
  const int64_t panels = n / kPanel;
  const Split s = split_linear(four_panels(), m, panels, k / kKBlock, epilogue, threads);
  std::vector<int64_t> work(threads), covered(panels);
  for (int64_t i = 0; i < s.count(); ++i) {
    const LinearPiece p = piece_of(s, i, m, panels);
    CHECK(p.row_begin < p.row_end && p.panel_begin < p.panel_end);
    CHECK(!is_gated(epilogue) || p.panel_begin % 2 == 0, "gate without up");
    for (int64_t j = p.panel_begin; j < p.panel_end; ++j) covered[j] += p.row_end - p.row_begin;
    *std::min_element(work.begin(), work.end()) +=
        (p.panel_end - p.panel_begin) * (p.row_end - p.row_begin);
  }
  CHECK(std::all_of(covered.begin(), covered.end(), [&](int64_t rows) { return rows == m; }));
  const double most = static_cast<double>(*std::max_element(work.begin(), work.end()));
  return static_cast<double>(panels * m) / threads / most;
}

void test_few_rows_keep_many_workers_busy() {
  for (const int64_t m : {1, 6}) {
    for (const int threads : {2, 8, 14, 28, 56}) {
      for (const int64_t n : {896, 1152, 4096, 9728}) {
        const double found = efficiency(m, n, 896, Epilogue::store, threads);
        const int64_t panels = n / kPanel, share = (panels + threads - 1) / threads;
        const double best = static_cast<double>(panels) / static_cast<double>(threads * share);
        CHECK(found >= best * 8 / 9, "n %d, %d workers: %.2f of %.2f", int(n), threads, found,
              best);
      }
    }
    CHECK(efficiency(m, 896, 4864, Epilogue::store, 56) == 1);
    CHECK(efficiency(m, 4096, 4096, Epilogue::add, 56) > 0.9);
    CHECK(efficiency(m, 9728, 896, Epilogue::silu_mul, 56) > 0.9);
  }
}

void test_many_rows_are_split_as_well() {
  for (const int64_t m : {7, 16, 17, 100, 530, 2048}) {
    for (const int threads : {1, 2, 7, 56}) {
      efficiency(m, 896, 896, Epilogue::store, threads);
      efficiency(m, 1024, 4864, Epilogue::silu_mul, threads);
    }
  }
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return run_cases(
      argc, argv,
      {TM_CASE(test_activation_rows_spread_over_the_cache),
       TM_CASE(test_few_rows_keep_many_workers_busy), TM_CASE(test_many_rows_are_split_as_well)});
}
