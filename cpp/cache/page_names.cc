#include "cache/page_names.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace turbomind {

bool PageNames::InPlace::before(const Place& a, const Place& b) {
  if (!(a.parent == b.parent))
    return a.parent.lo != b.parent.lo ? a.parent.lo < b.parent.lo : a.parent.hi < b.parent.hi;
  if (a.group != b.group) return a.group < b.group;
  return std::lexicographical_compare(a.tokens, a.tokens + a.count, b.tokens, b.tokens + b.count);
}

const StoredPage* PageNames::find(const ChainKey& key, int group) const {
  const auto it = by_key_.find({key, group});
  return it == by_key_.end() ? nullptr : it->second;
}

const StoredPage* PageNames::find_beginning(const ChainKey& parent, int group,
                                            const int32_t* tokens, int count, int* shared) const {
  *shared = 0;
  const StoredPage* best = nullptr;
  const auto consider = [&](const StoredPage* page) {
    if (!(page->parent == parent) || page->group != group) return;
    const size_t most = std::min(page->tokens.size(), static_cast<size_t>(count));
    const auto end = std::mismatch(tokens, tokens + most, page->tokens.begin()).first;
    if (end - tokens > *shared) {
      *shared = static_cast<int>(end - tokens);
      best = page;
    }
  };
  const auto at = by_place_.lower_bound(Place{parent, group, tokens, static_cast<size_t>(count)});
  if (at != by_place_.end()) consider(*at);
  if (at != by_place_.begin()) consider(*std::prev(at));
  return best;
}

bool PageNames::followed(const ChainKey& key, int group) const {
  const auto at = by_place_.lower_bound(Place{key, group, nullptr, 0});
  return at != by_place_.end() && (*at)->parent == key && (*at)->group == group;
}

std::vector<const StoredPage*> PageNames::behind(const ChainKey& key) const {
  std::vector<const StoredPage*> pages;
  auto at = by_place_.lower_bound(Place{key, std::numeric_limits<int>::min(), nullptr, 0});
  for (; at != by_place_.end() && (*at)->parent == key; ++at) pages.push_back(*at);
  return pages;
}

bool PageNames::insert(const StoredPage* page) {
  const auto [named, fresh] = by_key_.try_emplace({page->key, page->group}, page);
  if (!fresh) return false;
  bool placed = false;
  try {
    placed = by_place_.insert(page).second;
  } catch (...) {
    by_key_.erase(named);
    throw;
  }
  if (!placed) by_key_.erase(named);
  return placed;
}

void PageNames::erase(const StoredPage* page) {
  by_key_.erase({page->key, page->group});
  by_place_.erase(page);
}

}  // namespace turbomind
