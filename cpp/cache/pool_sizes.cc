#include "cache/pool_sizes.h"

#include <algorithm>
#include <limits>

namespace turbomind {

namespace {

constexpr int64_t kMostPages = std::numeric_limits<int32_t>::max();
constexpr int64_t kLeastIdle = 2;  // idle sequences whose windows fit, or a last turn's beginning
constexpr int64_t kIdleShare = 9;  // memory of the first group for each part for idle windows

int64_t bytes_of(const CacheGroup& group) {
  return std::max<int64_t>(static_cast<int64_t>(group.page_bytes), 1);
}

// Returns the index of the group that reaches the furthest back.
size_t furthest(const std::vector<CacheGroup>& groups) {
  const auto reach = [](const CacheGroup& g) {
    return g.kind == CacheKind::window ? g.window : std::numeric_limits<int64_t>::max();
  };
  const auto nearer = [&](const CacheGroup& a, const CacheGroup& b) { return reach(a) < reach(b); };
  return std::max_element(groups.begin(), groups.end(), nearer) - groups.begin();
}

// Returns the sizes where the group `first` gets `pages` pages.
std::vector<int64_t> sizes_of(const std::vector<CacheGroup>& groups, size_t first, int64_t pages,
                              const PoolDemand& demand) {
  int64_t windows = 0;  // bytes of the windows of one sequence
  for (size_t g = 0; g < groups.size(); ++g)
    if (g != first) windows += pages_of_window(groups[g].window) * bytes_of(groups[g]);
  std::vector<int64_t> sizes(groups.size(), pages);
  if (windows == 0) return sizes;
  const int64_t idle = kLeastIdle + pages * bytes_of(groups[first]) / (kIdleShare * windows);
  const int64_t chunk = (demand.chunk + kPageTokens - 1) / kPageTokens;
  for (size_t g = 0; g < groups.size(); ++g) {
    const int64_t needed = (demand.rows + idle) * pages_of_window(groups[g].window) + 2 * chunk;
    if (g != first) sizes[g] = std::min(needed, pages);
  }
  return sizes;
}

bool fits(const std::vector<CacheGroup>& groups, const std::vector<int64_t>& sizes, int64_t bytes) {
  for (size_t g = 0; g < groups.size(); ++g) {
    if (sizes[g] > bytes / bytes_of(groups[g])) return false;
    bytes -= sizes[g] * bytes_of(groups[g]);
  }
  return true;
}

}  // namespace

std::vector<int64_t> pool_sizes(const std::vector<CacheGroup>& groups, const PoolDemand& demand) {
  if (groups.empty()) return {};
  const size_t first = furthest(groups);
  if (demand.pages > 0) return sizes_of(groups, first, std::min(demand.pages, kMostPages), demand);
  // The numbers of all groups grow with that of the first: the largest one that fits.
  int64_t low = 0,
          high = std::min(std::max<int64_t>(demand.bytes, 0) / bytes_of(groups[first]), kMostPages);
  while (low < high) {
    const int64_t middle = low + (high - low + 1) / 2;
    if (fits(groups, sizes_of(groups, first, middle, demand), demand.bytes)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return sizes_of(groups, first, low, demand);
}

}  // namespace turbomind
