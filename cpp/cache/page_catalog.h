// What a tier knows of its pages, in memory: by key, by what they begin with, by what they are
// worth.
#pragma once

#include <cstdint>
#include <set>
#include <unordered_map>
#include <vector>

#include "cache/lower_tier.h"

namespace turbomind {

struct CatalogPage {
  ChainKey key, parent;
  int group = 0;
  std::vector<int32_t> tokens;
  int first_head = 0, heads = 0;
  uint64_t numerics = 0;  // a hash of its numerics id
  bool foreign = false;   // of another one than the tier's own
  size_t payload_bytes = 0;
  size_t disk_bytes = 0;
  float keep_value = 0;
  int64_t last_use = 0;  // microseconds since 1970
  bool unsaved = false;  // keep value and last use are not on the disk
  uint64_t segment = 0;  // where it lies
  uint64_t offset = 0;   // of its record
  uint64_t payload_offset = 0;

  bool partial() const;
};

// No lock of its own. Pages stay where they are until they are erased.
class PageCatalog {
 public:
  CatalogPage* find(const ChainKey& key, int group);
  std::vector<CatalogPage*> find_all(const ChainKey& key);  // of every group
  // The page behind `parent` that shares the longest beginning with tokens [count]; null for none.
  CatalogPage* find_beginning(const ChainKey& parent, int group, const int32_t* tokens, int count,
                              int* shared);
  std::vector<CatalogPage*> partial_children(const ChainKey& parent);  // of every group
  // The partial page that is a beginning of `page` and not all of it; null for none.
  CatalogPage* find_partial_beginning(const CatalogPage& page);

  CatalogPage* insert(CatalogPage page);  // the key is not there yet
  void erase(CatalogPage* page);
  void set_use(CatalogPage* page, float keep_value, int64_t last_use);
  // Of the pages that nothing stored continues the one with the lowest (keep value, last use): what
  // lies behind a page is of no use without it. Null when empty.
  CatalogPage* least_valuable();

  int64_t size() const { return static_cast<int64_t>(pages_.size()); }
  template <typename F>
  void for_each(F&& f) {
    for (auto& item : pages_) f(item.second);
  }

 private:
  struct Probe {
    int group;
    const int32_t* tokens;
    int count;
  };
  struct ByTokens {
    using is_transparent = void;
    static Probe probe(const CatalogPage* page);
    static Probe probe(const Probe& p) { return p; }
    static bool less(const Probe& a, const Probe& b);
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return less(probe(a), probe(b));
    }
  };
  struct ByValue {
    bool operator()(const CatalogPage* a, const CatalogPage* b) const;
  };
  using Children = std::set<CatalogPage*, ByTokens>;

  bool has_children(const CatalogPage& page) const;
  void update_leaf(CatalogPage* page);

  std::unordered_multimap<ChainKey, CatalogPage> pages_;
  std::unordered_map<ChainKey, Children> children_;  // by parent
  std::set<CatalogPage*, ByValue> leaves_;
};

}  // namespace turbomind
