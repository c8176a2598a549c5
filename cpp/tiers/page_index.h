// Index of stored pages, for the tiers: by block hash, or by parent and tokens.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <set>
#include <unordered_map>
#include <vector>

#include "cache/block_hash.h"

namespace turbomind {

// Refers to pages that its owner stores at a fixed address, with key, parent, group, tokens and
// `foreign` unchanged. Not synchronised. Lookups take logarithmic time, also when many pages share
// a parent.
template <typename Page>
class PageIndex {
 public:
  // Returns the page, or null.
  Page* find(const BlockHash& key, int group) const {
    const auto [first, last] = by_key_.equal_range(key);
    const auto it =
        std::find_if(first, last, [&](const auto& item) { return item.second->group == group; });
    return it != last ? it->second : nullptr;
  }

  // Returns the pages of every group.
  std::vector<Page*> find_all(const BlockHash& key) const {
    std::vector<Page*> found;
    const auto [first, last] = by_key_.equal_range(key);
    for (auto it = first; it != last; ++it) found.push_back(it->second);
    return found;
  }

  // The same as LowerTier::find_prefix(). In lexicographic order a neighbour has the longest common
  // prefix.
  Page* find_prefix(const BlockHash& parent, int group, const int32_t* tokens, int count,
                    int* shared) const {
    *shared = 0;
    Page* best = nullptr;
    const auto consider = [&](Page* page) {
      if (!(page->parent == parent) || page->group != group) return;
      const int n = common(page->tokens, tokens, static_cast<size_t>(count));
      if (n > *shared || (best != nullptr && n == *shared && best->foreign && !page->foreign)) {
        best = page;
        *shared = n;
      }
    };
    const auto at = by_place_.lower_bound(Place{parent, group, tokens, static_cast<size_t>(count)});
    if (at != by_place_.end()) consider(*at);
    if (at != by_place_.begin()) consider(*std::prev(at));
    return best;
  }

  // Returns the longest page whose tokens are a proper prefix of those of `page`, or null.
  Page* find_shorter(const Page& page) const {
    const auto at = by_place_.lower_bound(place_of(&page));
    if (at == by_place_.begin()) return nullptr;
    Page* before = *std::prev(at);
    const size_t size = before->tokens.size();
    const bool is_prefix =
        before->parent == page.parent && before->group == page.group && size < page.tokens.size() &&
        std::equal(before->tokens.begin(), before->tokens.end(), page.tokens.begin());
    return is_prefix ? before : nullptr;
  }

  // Returns whether a page of this group follows the page `key`.
  bool followed(const BlockHash& key, int group) const {
    const auto at = by_place_.lower_bound(Place{key, group, nullptr, 0});
    return at != by_place_.end() && (*at)->parent == key && (*at)->group == group;
  }

  // Returns all pages that follow the page `key`, of every group.
  std::vector<Page*> followers(const BlockHash& key) const {
    std::vector<Page*> pages;
    auto at = by_place_.lower_bound(Place{key, std::numeric_limits<int>::min(), nullptr, 0});
    for (; at != by_place_.end() && (*at)->parent == key; ++at) pages.push_back(*at);
    return pages;
  }

  // Adds a page whose (key, group) is not in the index.
  void insert(Page* page) {
    const auto named = by_key_.emplace(page->key, page);
    try {
      by_place_.insert(page);
    } catch (...) {
      by_key_.erase(named);
      throw;
    }
  }
  void erase(Page* page) {
    by_place_.erase(page);
    const auto [first, last] = by_key_.equal_range(page->key);
    const auto it =
        std::find_if(first, last, [&](const auto& item) { return item.second == page; });
    if (it != last) by_key_.erase(it);
  }
  int64_t size() const { return static_cast<int64_t>(by_key_.size()); }

 private:
  struct Place {
    const BlockHash& parent;
    int group;
    const int32_t* tokens;
    size_t count;
  };
  static Place place_of(const Page* page) {
    return {page->parent, page->group, page->tokens.data(), page->tokens.size()};
  }
  // By parent, then group, then tokens in lexicographic order.
  struct InPlace {
    using is_transparent = void;
    static bool before(const Place& a, const Place& b) {
      if (!(a.parent == b.parent))
        return a.parent.lo != b.parent.lo ? a.parent.lo < b.parent.lo : a.parent.hi < b.parent.hi;
      if (a.group != b.group) return a.group < b.group;
      return std::lexicographical_compare(a.tokens, a.tokens + a.count, b.tokens,
                                          b.tokens + b.count);
    }
    bool operator()(const Page* a, const Page* b) const { return before(place_of(a), place_of(b)); }
    bool operator()(const Page* a, const Place& b) const { return before(place_of(a), b); }
    bool operator()(const Place& a, const Page* b) const { return before(a, place_of(b)); }
  };
  static int common(const std::vector<int32_t>& a, const int32_t* b, size_t count) {
    const size_t most = std::min(a.size(), count);
    return static_cast<int>(std::mismatch(b, b + most, a.begin()).first - b);
  }

  std::unordered_multimap<BlockHash, Page*> by_key_;
  std::set<Page*, InPlace> by_place_;
};

}  // namespace turbomind
