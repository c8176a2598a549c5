// Which pages hold the KV of which sequence: taking, sharing, sealing, finding and releasing them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cache/page_pool.h"
#include "engine/sequence.h"
#include "model/model.h"

namespace turbomind {

class KvCache {
 public:
  // `pages` per cache group. Throws Error(model) for a kind of group it cannot keep.
  KvCache(Model& model, int64_t pages, bool prefix_reuse);

  Sequence make_sequence(int adapter, const std::string& salt, float keep_value) const;
  int64_t max_context() const { return max_context_; }  // tokens the pool can hold of one sequence

  // Before a sequence runs: leaves all but its first `reusable` tokens to compute, and takes over
  // pages of the longest prefix the index has when that is more than it has itself.
  void resume(Sequence& seq, int64_t reusable);

  // True when free and cached pages suffice to compute the next `tokens` tokens; copies of pages
  // that must not be written in place are counted.
  bool can_write(const Sequence& seq, int64_t tokens) const;
  // True when they suffice for all committed tokens and the next one, `promised` pages per group
  // left aside. What a sequence itself still needs for that is added by add_outstanding().
  bool can_hold(const Sequence& seq, const std::vector<int64_t>& promised) const;
  void add_outstanding(const Sequence& seq, std::vector<int64_t>& promised) const;
  // Takes those pages. Only after can_write().
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

  size_t groups() const { return groups_.size(); }
  void evict_all();
  int64_t total() const;
  int64_t free() const;
  int64_t cached() const;
  // Throws Error(internal) unless `sequences` hold exactly the references the pools count.
  void check(const std::vector<const Sequence*>& sequences) const;

 private:
  int64_t first_reachable(int group, int64_t index) const;  // page of the oldest key a query sees
  bool window_intact(const Sequence& seq) const;
  int64_t taken_by_write(const Sequence& seq, int group, int64_t tokens) const;
  PageIdentity identity(const Sequence& seq, int64_t page) const;
  void extend_keys(Sequence& seq, int64_t pages);
  int64_t longest_hit(Sequence& seq, int64_t most);  // pages
  void adopt(Sequence& seq, int64_t pages);
  void seal(Sequence& seq);
  void release_out_of_reach(Sequence& seq);
  void release_entry(Sequence& seq, int group, int64_t page, float keep_value);
  void trim(Sequence& seq);  // to the pages of written tokens

  Model& model_;
  const bool prefix_reuse_;
  std::vector<CacheGroup> groups_;
  std::vector<PagePool> pools_;
  int64_t max_context_ = 0;
};

}  // namespace turbomind
