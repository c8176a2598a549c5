// The KV cache of the device: which pages hold the KV of which sequence. It takes, shares
// (copy-on-write), seals, finds and releases pages. A page (vLLM: block) holds kPageTokens tokens
// of one cache group. Bookkeeping only: a model owns the memory, and cpp/tiers copies pages to
// lower tiers.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cache/kv_layout.h"
#include "cache/page_pool.h"
#include "cache/sequence.h"

namespace turbomind {

// The memory of pages as the KV cache sees it. engine/page_memory_of.h fills it from the model, so
// that cache/ does not depend on model/.
struct PageMemory {
  std::string fingerprint;         // of the model; seeds block hashes
  std::vector<CacheGroup> groups;  // layers that share a page table
  // Allocates pages, a number per group; called once, by KvCache.
  std::function<void(const std::vector<int64_t>& pages)> allocate;
  // Copies the whole page `from` of a group over its page `to`.
  std::function<void(int group, int32_t from, int32_t to)> copy;
};

// Pages of a prefix, one reference each, outside of any sequence: per cache group entry j is the
// page of tokens [64 j, 64 j + 64), -1 before the first one held.
struct PageTables {
  std::vector<std::vector<int32_t>> pages;
  std::vector<int64_t> first_held;
};

// A reference to a page that is not in a sequence's table: the page is being loaded or saved.
struct HeldPage {
  int group = 0;
  int32_t page = -1;
};

// Used by the engine thread. Methods that take pages may throw std::bad_alloc.
class KvCache {
 public:
  // Allocates pages[g] pages for each cache group g (cache/pool_sizes.h). `prefix_reuse`: sealed
  // pages are found by other sequences. Throws Error(model) for a kind of group that is not
  // supported.
  KvCache(PageMemory memory, const std::vector<int64_t>& pages, bool prefix_reuse);

  // Returns an empty sequence.
  Sequence make_sequence(int adapter, const std::string& salt, float retention_priority) const;
  // Returns the most tokens of one sequence that the pool can hold.
  int64_t max_context() const { return max_context_; }

  // Prepares a sequence to run: lowers `written` to at most `reusable` tokens, and takes over the
  // pages of the longest prefix in the index when that is longer than its own. `exact`: foreign KV
  // is not used.
  void resume(Sequence& seq, int64_t reusable, bool exact = false);

  // Makes the KV of the first `tokens` tokens of `other` that of `seq`, whose first tokens and root
  // are equal: the pages are shared, the last one, which may not be full, until one of them writes
  // to it. Returns false, with nothing changed, where a window of `other` has left pages behind.
  bool share(Sequence& seq, const Sequence& other, int64_t tokens);

  // Returns for how many of the next `most` tokens free and cached pages suffice, counting copies
  // of pages that must not be written in place.
  int64_t writable_tokens(const Sequence& seq, int64_t most) const;
  bool can_write(const Sequence& seq, int64_t tokens) const {
    return writable_tokens(seq, tokens) == tokens;
  }
  // For several sequences at once: adds the pages that prepare_write() would take to `pages`
  // [group].
  void add_taken(const Sequence& seq, int64_t tokens, std::vector<int64_t>& pages) const;
  bool has_available(const std::vector<int64_t>& pages) const;
  // Returns whether free and cached pages, less `promised` ones per group, suffice for all
  // committed tokens of the sequence and one more. add_outstanding() adds the pages it still needs
  // for that and for `growth` further tokens.
  bool can_hold(const Sequence& seq, const std::vector<int64_t>& promised) const;
  void add_outstanding(const Sequence& seq, std::vector<int64_t>& promised,
                       int64_t growth = 0) const;
  // Takes the pages for the next `tokens` tokens. Only after can_write(), or has_available() for
  // all sequences.
  void prepare_write(Sequence& seq, int64_t tokens);
  // Releases the pages that prepare_write() took: the step was not run.
  void abandon_write(Sequence& seq) { trim(seq); }
  // Reports that the step was run: KV of `tokens` more tokens exists. Seals full pages and releases
  // pages that windows no longer reach; those that the last turn begins with keep the sequence's
  // retention priority, so that computing it again finds them.
  void commit_write(Sequence& seq, int64_t tokens);

  // Returns a copy that shares every page.
  Sequence fork(const Sequence& seq);
  // Shortens the KV to `written` tokens, or KV and tokens to `length`.
  void lower_written(Sequence& seq, int64_t written);
  void truncate(Sequence& seq, int64_t length);
  // Releases all pages of the sequence. Sealed ones stay cached.
  void drop_pages(Sequence& seq);
  bool holds_pages(const Sequence& seq) const { return seq.written > 0; }
  // Removes pages with KV of the tokens from `from` on from the index: the KV is not to be trusted.
  void discard(Sequence& seq, int64_t from);
  // Returns the hashes of pages that discard() removed; the caller clears it when it has removed
  // them from the lower tiers.
  std::vector<BlockHash>& discarded() { return discarded_; }

  // For cpp/tiers, which moves pages between the device and lower tiers.
  PagePool& pool(int group) { return pools_[group]; }
  const PagePool& pool(int group) const { return pools_[group]; }
  const CacheGroup& group(int group) const { return memory_.groups[group]; }
  // Returns the page of the oldest token that a query at token `index` attends to.
  int64_t first_reachable(int group, int64_t index) const;
  // Computes block hashes up to the first `pages` pages.
  void extend_keys(Sequence& seq, int64_t pages);
  // Returns the identity of a full page whose hash has been computed.
  PageIdentity identity(const Sequence& seq, int64_t page) const;
  // Returns the full pages of the longest prefix that the sequence holds or the index has, at most
  // `most`. It looks up those that the sequence does not hold.
  int64_t longest_hit(Sequence& seq, int64_t most, bool exact);
  // Seals a page that has one reference and returns it. If the index has another page of that
  // identity, the reference moves to that one, which is returned; a foreign page is replaced by one
  // that is not.
  int32_t settle(int group, int32_t page, const PageIdentity& identity, float retention_priority);
  // Makes `tables` the pages of the sequence's first `tokens` tokens.
  void install(Sequence& seq, PageTables&& tables, int64_t tokens);
  void release(PageTables& tables, float retention_priority);

  size_t groups() const { return memory_.groups.size(); }
  bool prefix_reuse() const { return prefix_reuse_; }
  // Frees every cached page.
  void evict_all();
  // Removes pages from the index; cached ones become free.
  void forget(const std::vector<BlockHash>& keys);
  // Pages, over all groups.
  int64_t total() const;
  int64_t free() const;
  int64_t cached() const;
  // Throws Error(internal) unless `sequences` and `held` together have exactly the references that
  // the pools count.
  void check(const std::vector<const Sequence*>& sequences,
             const std::vector<HeldPage>& held = {}) const;

 private:
  bool window_intact(const Sequence& seq) const;
  int64_t first_needed(int group, int64_t written) const;
  bool copies_tail(const Sequence& seq, int group) const;
  int64_t taken_by_write(const Sequence& seq, int group, int64_t tokens) const;
  int32_t find(int group, const PageIdentity& identity, bool exact) const;
  int64_t first_foreign(const Sequence& seq) const;  // token
  void adopt(Sequence& seq, int64_t pages);
  void seal(Sequence& seq);
  void release_out_of_reach(Sequence& seq);
  bool restarts_turn(const Sequence& seq, int group, int64_t page) const;
  void release_entry(Sequence& seq, int group, int64_t page, float retention_priority);
  void trim(Sequence& seq);  // to the pages of written tokens

  const PageMemory memory_;
  const bool prefix_reuse_;
  std::vector<PagePool> pools_;
  int64_t max_context_ = 0;
  std::vector<BlockHash> discarded_;
};

}  // namespace turbomind
