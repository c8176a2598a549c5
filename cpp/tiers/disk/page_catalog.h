// The index of the disk tier in memory: pages by block hash, by parent and tokens, and in order of
// eviction.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "tiers/page_index.h"

namespace turbomind {

struct CatalogPage {
  BlockHash key, parent;
  int group = 0;
  std::vector<int32_t> tokens;
  int first_head = 0, heads = 0;
  uint64_t numerics = 0;  // hash of its numerics fingerprint
  bool foreign = false;   // of another fingerprint than the tier's own
  size_t payload_bytes = 0;
  size_t disk_bytes = 0;
  float retention_priority = 0;
  int64_t last_use = 0;   // microseconds since 1970
  bool unsaved = false;   // retention priority and last use are not written yet
  bool was_read = false;  // by this instance
  uint64_t segment = 0;   // id of its segment
  uint64_t offset = 0;    // of its record in the index file
  uint64_t payload_offset = 0;

  bool partial() const;
};

// Not synchronised. Addresses of pages are stable until they are erased.
class PageCatalog : public PageIndex<CatalogPage> {
 public:
  CatalogPage* insert(CatalogPage page);  // its (key, group) is not in the catalog
  void erase(CatalogPage* page);
  void set_use(CatalogPage* page, float retention_priority, int64_t last_use);
  // Returns the page with the lowest (retention priority, last use) among those that no stored page
  // follows, since a page is useless without its parent, and are not in `except`; null when there
  // is none.
  CatalogPage* least_valuable(const std::unordered_set<BlockHash>* except = nullptr) const;

  template <typename F>
  void for_each(F&& f) {
    for (auto& item : pages_) f(*item.second);
  }

 private:
  struct ByValue {
    bool operator()(const CatalogPage* a, const CatalogPage* b) const;
  };

  void update_leaf(CatalogPage* page);
  void update_parent(const CatalogPage& page);

  std::unordered_map<const CatalogPage*, std::unique_ptr<CatalogPage>> pages_;
  std::set<CatalogPage*, ByValue> leaves_;
};

}  // namespace turbomind
