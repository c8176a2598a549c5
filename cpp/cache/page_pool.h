// Who holds the pages of one cache group. Bookkeeping only: the model owns the memory.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "cache/prefix_index.h"

namespace turbomind {

// A page is free, referenced (by one or more sequences), or cached: sealed, held by nobody, found
// by its block hash and given up in order of (retention priority, last use). free + referenced +
// cached = total.
class PagePool {
 public:
  explicit PagePool(int64_t pages);

  int64_t total() const { return static_cast<int64_t>(pages_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t cached() const { return static_cast<int64_t>(cached_.size()); }
  int64_t referenced() const { return total() - free() - cached(); }
  int64_t available() const { return free() + cached(); }  // what take() can give

  // A page held once, with what its last owner left in it (Model::forward): a free one, else the
  // cached one that is worth least. -1 when every page is referenced.
  int32_t take();
  void reference(int32_t page);
  // Drops one reference. The last one sends a sealed page to the cache (when memory for that is
  // short, it is forgotten), others to the free list. Does not throw.
  // The page keeps the highest retention priority of those who released it.
  void release(int32_t page, float retention_priority);

  // Makes the page immutable and findable. False when its key is taken; then it stays as it was.
  bool seal(int32_t page, const PageIdentity& identity);
  void unseal(int32_t page);
  int32_t find(const PageIdentity& identity) const { return index_.find(identity); }
  bool sealed(int32_t page) const { return pages_[page].sealed; }
  int32_t references(int32_t page) const { return pages_[page].references; }
  bool writable(int32_t page) const { return references(page) == 1 && !sealed(page); }
  // Nobody finds it again; a cached one becomes free.
  void forget(int32_t page);
  void forget(const BlockHash& key);
  // Whether what it holds was made, or built upon what was made, under another numerics
  // fingerprint.
  bool foreign(int32_t page) const { return pages_[page].foreign; }
  void set_foreign(int32_t page, bool foreign) { pages_[page].foreign = foreign; }

  void evict_all();  // every cached page becomes free

  // Throws Error(internal) unless each page is in exactly one state and `expected[page]` sequences
  // hold it.
  void check(const std::vector<int32_t>& expected) const;

 private:
  struct Page {
    int32_t references = 0;
    bool sealed = false;
    bool foreign = false;
    float retention_priority = 0;
    uint64_t last_use = 0;
    BlockHash key;
  };
  struct CachedPage {
    float retention_priority;
    uint64_t last_use;
    int32_t page;
    auto operator<=>(const CachedPage&) const = default;
  };
  CachedPage cached_entry(int32_t page) const {
    return {pages_[page].retention_priority, pages_[page].last_use, page};
  }
  void evict(int32_t page);

  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::set<CachedPage> cached_;  // first to leave first
  PrefixIndex index_;
  uint64_t clock_ = 0;
};

}  // namespace turbomind
