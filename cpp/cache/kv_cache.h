// Which pages hold the KV of which sequence: taking, sharing, sealing, finding and releasing them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/page_memory.h"
#include "cache/page_pool.h"
#include "cache/sequence.h"

namespace turbomind {

// Pages of a beginning that somebody holds once each: per cache group those of tokens
// [64 j, 64 j + 64), -1 before the first one held.
struct PageTables {
  std::vector<std::vector<int32_t>> pages;
  std::vector<int64_t> first_held;
};

// A page that no sequence's table has: it is on its way to or from a tier below.
struct HeldPage {
  int group = 0;
  int32_t page = -1;
};

class KvCache {
 public:
  // `pages` per cache group. Throws Error(model) for a kind of group it cannot keep.
  KvCache(PageMemory memory, int64_t pages, bool prefix_reuse);

  Sequence make_sequence(int adapter, const std::string& salt, float retention_priority) const;
  int64_t max_context() const { return max_context_; }  // tokens the pool can hold of one sequence

  // Before a sequence runs: leaves all but its first `reusable` tokens to compute, and takes over
  // pages of the longest prefix the index has when that is more than it has itself. `exact`: of
  // foreign KV nothing is used.
  void resume(Sequence& seq, int64_t reusable, bool exact = false);

  // True when free and cached pages suffice to compute the next `tokens` tokens; copies of pages
  // that must not be written in place are counted.
  bool can_write(const Sequence& seq, int64_t tokens) const;
  // For several sequences at once: what prepare_write() would take is added to `pages`, by group.
  void add_taken(const Sequence& seq, int64_t tokens, std::vector<int64_t>& pages) const;
  bool has_available(const std::vector<int64_t>& pages) const;
  // True when they suffice for all committed tokens and the next one, `promised` pages per group
  // left aside. What a sequence itself still needs for that is added by add_outstanding().
  bool can_hold(const Sequence& seq, const std::vector<int64_t>& promised) const;
  void add_outstanding(const Sequence& seq, std::vector<int64_t>& promised) const;
  // Takes those pages. Only after can_write(), or has_available() for all of them.
  void prepare_write(Sequence& seq, int64_t tokens);
  // The step was not run: gives back what prepare_write took.
  void abandon_write(Sequence& seq) { trim(seq); }
  // The step was run: KV of `tokens` more tokens exists. Seals, drops pages out of windows' reach.
  void commit_write(Sequence& seq, int64_t tokens);

  Sequence fork(const Sequence& seq);  // shares every page
  void lower_written(Sequence& seq, int64_t written);
  void truncate(Sequence& seq, int64_t length);
  void drop_pages(Sequence& seq);  // written becomes 0; sealed pages stay cached
  bool holds_pages(const Sequence& seq) const { return seq.written > 0; }
  // KV computed from `from` on is not to be trusted: nobody finds it again.
  void discard(Sequence& seq, int64_t from);
  // Keys of the pages that discard() was told of; whoever has dealt with them clears it.
  std::vector<BlockHash>& discarded() { return discarded_; }

  // For whoever moves pages between the device and the tiers below.
  PagePool& pool(int group) { return pools_[group]; }
  const PagePool& pool(int group) const { return pools_[group]; }
  const CacheGroup& group(int group) const { return memory_.groups[group]; }
  int64_t first_reachable(int group, int64_t index) const;  // page of the oldest key a query sees
  void extend_keys(Sequence& seq, int64_t pages);
  PageIdentity identity(const Sequence& seq, int64_t page) const;  // whose key is known
  int64_t longest_hit(Sequence& seq, int64_t most, bool exact);    // pages
  // Seals a page that is held once. Where another one of that identity is there already, that one
  // is held instead and returned; one that is foreign gives way to one that is not.
  int32_t settle(int group, int32_t page, const PageIdentity& identity, float retention_priority);
  // `tables` become the sequence's, for its first `tokens` tokens.
  void install(Sequence& seq, PageTables&& tables, int64_t tokens);
  void release(PageTables& tables, float retention_priority);

  size_t groups() const { return memory_.groups.size(); }
  bool prefix_reuse() const { return prefix_reuse_; }
  void evict_all();
  void forget(const std::vector<BlockHash>& keys);  // cached ones become free; none is found again
  int64_t total() const;
  int64_t free() const;
  int64_t cached() const;
  // Throws Error(internal) unless `sequences` and `held` have exactly the references the pools
  // count.
  void check(const std::vector<const Sequence*>& sequences,
             const std::vector<HeldPage>& held = {}) const;

 private:
  bool window_intact(const Sequence& seq) const;
  int64_t taken_by_write(const Sequence& seq, int group, int64_t tokens) const;
  int32_t find(int group, const PageIdentity& identity, bool exact) const;
  int64_t first_foreign(const Sequence& seq) const;  // token
  void adopt(Sequence& seq, int64_t pages);
  void seal(Sequence& seq);
  void release_out_of_reach(Sequence& seq);
  void release_entry(Sequence& seq, int group, int64_t page, float retention_priority);
  void trim(Sequence& seq);  // to the pages of written tokens

  const PageMemory memory_;
  const bool prefix_reuse_;
  std::vector<PagePool> pools_;
  int64_t max_context_ = 0;
  std::vector<BlockHash> discarded_;
};

}  // namespace turbomind
