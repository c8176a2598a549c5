// Reference counts of the pages of one cache group. Bookkeeping only: a model owns the memory.
#pragma once

#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "cache/prefix_index.h"

namespace turbomind {

// A page is free, referenced (by one or more holders), or cached: sealed, without references, found
// by its block hash and evicted in order of retention priority and last use (LRU among equals).
// Priorities age: one that is higher by 1 protects a page as long as kLifetime times all pages of
// the pool are released, so that pages in use outlive those of sessions closed long ago.
// free + referenced + cached = total. Engine thread.
class PagePool {
 public:
  static constexpr int64_t kLifetime = 8;
  // Retention priority of a page that a window has moved past: it is evicted before all others.
  static constexpr float kOutOfReach = -std::numeric_limits<float>::infinity();

  explicit PagePool(int64_t pages);

  int64_t total() const { return static_cast<int64_t>(pages_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int64_t cached() const { return static_cast<int64_t>(cached_.size()); }
  int64_t referenced() const { return total() - free() - cached(); }
  // Returns how many cached pages only holders that windows had moved past have released.
  int64_t out_of_reach() const { return out_of_reach_; }
  // Returns how many pages take() can return.
  int64_t available() const { return free() + cached(); }

  // Returns a page with one reference: a free one, else the cached one that is first to be evicted;
  // -1 when every page is referenced. Its memory holds what its last owner wrote (Model::forward).
  int32_t take();
  void reference(int32_t page);
  // Drops one reference. A sealed page without references becomes cached (without memory for that:
  // free), another one free. A page has the highest retention priority of all releases. Does not
  // throw.
  void release(int32_t page, float retention_priority);

  // Makes the page immutable and findable. Returns false, with nothing changed, when the index has
  // a page of that hash.
  bool seal(int32_t page, const PageIdentity& identity);
  void unseal(int32_t page);
  int32_t find(const PageIdentity& identity) const { return index_.find(identity); }
  bool sealed(int32_t page) const { return pages_[page].sealed; }
  int32_t references(int32_t page) const { return pages_[page].references; }
  bool writable(int32_t page) const { return references(page) == 1 && !sealed(page); }
  // Removes a page from the index; a cached one becomes free.
  void forget(int32_t page);
  void forget(const BlockHash& key);
  // Returns whether the page's KV was computed under another numerics fingerprint, or from such KV.
  bool foreign(int32_t page) const { return pages_[page].foreign; }
  void set_foreign(int32_t page, bool foreign) { pages_[page].foreign = foreign; }

  // Frees every cached page.
  void evict_all();

  // Throws Error(internal) unless each page is in exactly one state and has `expected[page]`
  // references.
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
    double worth;  // when its priority would have aged to 0, in releases of pages
    uint64_t last_use;
    int32_t page;
    auto operator<=>(const CachedPage&) const = default;
  };
  CachedPage cached_entry(int32_t page) const;
  void uncache(int32_t page);
  void evict(int32_t page);

  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::set<CachedPage> cached_;  // first to be evicted first
  int64_t out_of_reach_ = 0;
  PrefixIndex index_;
  uint64_t clock_ = 0;
};

}  // namespace turbomind
