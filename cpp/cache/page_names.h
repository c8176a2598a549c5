// Finds stored pages by their names: by chain key, or by the tokens they hold behind a page.
#pragma once

#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "cache/lower_tier.h"

namespace turbomind {

// Refers to pages that its owner keeps at a fixed address and unchanged (but for the keep value).
// Not synchronised. A lookup costs no more where many pages share a parent.
class PageNames {
 public:
  const StoredPage* find(const ChainKey& key, int group) const;
  // As LowerTier::find_beginning().
  const StoredPage* find_beginning(const ChainKey& parent, int group, const int32_t* tokens,
                                   int count, int* shared) const;
  // Whether it holds a page of this group behind the one named `key`.
  bool followed(const ChainKey& key, int group) const;
  // All pages behind the one named `key`, of every group.
  std::vector<const StoredPage*> behind(const ChainKey& key) const;

  // False when the name is taken.
  bool insert(const StoredPage* page);
  void erase(const StoredPage* page);
  size_t size() const { return by_key_.size(); }

 private:
  struct Name {
    ChainKey key;
    int group;
    bool operator==(const Name&) const = default;
  };
  struct HashName {
    size_t operator()(const Name& name) const noexcept {
      return name.key.lo + 0x9E3779B97F4A7C15u * static_cast<size_t>(name.group);
    }
  };
  struct Place {
    const ChainKey& parent;
    int group;
    const int32_t* tokens;
    size_t count;
  };
  static Place place_of(const StoredPage* page) {
    return {page->parent, page->group, page->tokens.data(), page->tokens.size()};
  }
  // By parent, then group, then tokens in dictionary order: next to where `tokens` would stand is
  // the page that shares the longest beginning with them.
  struct InPlace {
    using is_transparent = void;
    static bool before(const Place& a, const Place& b);
    bool operator()(const StoredPage* a, const StoredPage* b) const {
      return before(place_of(a), place_of(b));
    }
    bool operator()(const StoredPage* a, const Place& b) const { return before(place_of(a), b); }
    bool operator()(const Place& a, const StoredPage* b) const { return before(a, place_of(b)); }
  };

  std::unordered_map<Name, const StoredPage*, HashName> by_key_;
  std::set<const StoredPage*, InPlace> by_place_;
};

}  // namespace turbomind
