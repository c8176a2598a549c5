#include "cache/kv_cache.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cache/pool_sizes.h"
#include "core/error.h"

namespace turbomind {

namespace {

int64_t pages_of(int64_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

// Full pages that the sequence holds and that no other page could replace to its advantage.
int64_t own_pages(const Sequence& seq) {
  return std::min(seq.written, seq.foreign_from) / kPageTokens;
}

int64_t pages_needed(const CacheGroup& group, int64_t tokens) {
  const int64_t all = pages_of(tokens);
  return group.kind == CacheKind::window ? std::min(all, pages_of_window(group.window)) : all;
}

}  // namespace

KvCache::KvCache(PageMemory memory, const std::vector<int64_t>& pages, bool prefix_reuse)
    : memory_(std::move(memory)), prefix_reuse_(prefix_reuse) {
  max_context_ = std::numeric_limits<int64_t>::max();
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    const CacheGroup& group = memory_.groups[g];
    if (group.kind == CacheKind::recurrent)
      throw_error(ErrorCode::model, "cache group of kind recurrent: expected full or window");
    if (group.kind == CacheKind::window && group.window < 1)
      throw_error(ErrorCode::model, "window of a cache group: ", group.window, ", expected >= 1");
    // A window needs a page more, for the copy of a sealed last page. KV is written for one token
    // less than the limit, so that copy fits there too.
    if (group.kind != CacheKind::window || pages_of_window(group.window) >= pages[g])
      max_context_ = std::min(max_context_, pages[g] * kPageTokens);
    pools_.emplace_back(pages[g]);
  }
  memory_.allocate(pages);
}

Sequence KvCache::make_sequence(int adapter, const std::string& salt,
                                float retention_priority) const {
  Sequence seq;
  seq.root = root_key(memory_.fingerprint, adapter, salt);
  seq.adapter = adapter;
  seq.retention_priority = retention_priority;
  seq.pages.resize(memory_.groups.size());
  seq.first_held.resize(memory_.groups.size());
  return seq;
}

int64_t KvCache::first_reachable(int group, int64_t index) const {
  const CacheGroup& g = memory_.groups[group];
  if (g.kind != CacheKind::window) return 0;
  return std::max<int64_t>(0, index - g.window + 1) / kPageTokens;
}

// Returns the first page that the sequence holds: a query at the last page border reaches it, so
// that the sequence can be shortened to there.
int64_t KvCache::first_needed(int group, int64_t written) const {
  return first_reachable(group, written / kPageTokens * kPageTokens);
}

bool KvCache::window_intact(const Sequence& seq) const {
  for (size_t g = 0; g < memory_.groups.size(); ++g)
    if (seq.first_held[g] > first_reachable(static_cast<int>(g), seq.written)) return false;
  return true;
}

void KvCache::resume(Sequence& seq, int64_t reusable, bool exact) {
  lower_written(seq, exact ? std::min(reusable, seq.foreign_from) : reusable);
  if (!prefix_reuse_) return;
  const int64_t hit = longest_hit(seq, reusable / kPageTokens, exact);
  if (hit * kPageTokens > seq.written) adopt(seq, hit);
}

void KvCache::extend_keys(Sequence& seq, int64_t pages) {
  while (static_cast<int64_t>(seq.keys.size()) < pages) {
    const BlockHash& parent = seq.keys.empty() ? seq.root : seq.keys.back();
    const int32_t* tokens = seq.tokens.data() + seq.keys.size() * kPageTokens;
    seq.keys.push_back(next_key(parent, tokens, kPageTokens));
  }
}

PageIdentity KvCache::identity(const Sequence& seq, int64_t page) const {
  PageIdentity id;
  id.key = seq.keys[page];
  id.parent = page == 0 ? seq.root : seq.keys[page - 1];
  std::copy_n(seq.tokens.data() + page * kPageTokens, kPageTokens, id.tokens.data());
  return id;
}

int32_t KvCache::find(int group, const PageIdentity& identity, bool exact) const {
  const int32_t page = pools_[group].find(identity);
  return page >= 0 && exact && pools_[group].foreign(page) ? -1 : page;
}

int64_t KvCache::longest_hit(Sequence& seq, int64_t most, bool exact) {
  const int64_t own = std::min(most, own_pages(seq));
  // Per group: consecutive pages held or found, up to page j.
  std::vector<int64_t> consecutive;
  for (size_t g = 0; g < memory_.groups.size(); ++g)
    consecutive.push_back(own - std::min(own, seq.first_held[g]));
  int64_t best = own;
  for (int64_t j = own; j < most; ++j) {
    extend_keys(seq, j + 1);
    const PageIdentity id = identity(seq, j);
    bool usable = true;
    for (size_t g = 0; g < memory_.groups.size(); ++g) {
      const bool found = find(static_cast<int>(g), id, exact) >= 0;
      if (!found && memory_.groups[g].kind != CacheKind::window) return best;
      consecutive[g] = found ? consecutive[g] + 1 : 0;
      const int64_t first = first_reachable(static_cast<int>(g), (j + 1) * kPageTokens);
      usable = usable && consecutive[g] >= j + 1 - first;
    }
    if (usable) best = j + 1;
  }
  return best;
}

void KvCache::adopt(Sequence& seq, int64_t pages) {
  const int64_t own = own_pages(seq);
  PageTables tables;
  tables.pages.assign(memory_.groups.size(), std::vector<int32_t>(pages, -1));
  tables.first_held.resize(memory_.groups.size());
  // Referenced before the old ones are released, so that none is freed in between.
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    tables.first_held[g] = first_reachable(static_cast<int>(g), pages * kPageTokens);
    for (int64_t j = tables.first_held[g]; j < pages; ++j) {
      int32_t& page = tables.pages[g][j] =
          j < own ? seq.pages[g][j] : pools_[g].find(identity(seq, j));
      pools_[g].reference(page);
    }
  }
  install(seq, std::move(tables), pages * kPageTokens);
}

bool KvCache::share(Sequence& seq, const Sequence& other, int64_t tokens) {
  PageTables tables;
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    const int group = static_cast<int>(g);
    if (other.first_held[g] > first_reachable(group, tokens)) return false;
    const int64_t first = std::max(other.first_held[g], first_needed(group, tokens));
    tables.first_held.push_back(first);
    auto& pages = tables.pages.emplace_back(pages_of(tokens), -1);
    std::copy(other.pages[g].begin() + first, other.pages[g].begin() + pages_of(tokens),
              pages.begin() + first);
  }
  // Referenced before the old ones are released, so that none is freed in between.
  for (size_t g = 0; g < memory_.groups.size(); ++g)
    for (int64_t j = tables.first_held[g]; j < pages_of(tokens); ++j)
      pools_[g].reference(tables.pages[g][j]);
  install(seq, std::move(tables), tokens);
  return true;
}

void KvCache::install(Sequence& seq, PageTables&& tables, int64_t tokens) {
  for (size_t g = 0; g < memory_.groups.size(); ++g)
    for (int64_t j = static_cast<int64_t>(seq.pages[g].size()); j-- > seq.first_held[g];)
      release_entry(seq, static_cast<int>(g), j, seq.retention_priority);
  seq.pages = std::move(tables.pages);
  seq.first_held = std::move(tables.first_held);
  seq.written = tokens;
  seq.sealed = tokens / kPageTokens;
  seq.posted = 0;
  seq.foreign_from = first_foreign(seq);
}

int64_t KvCache::first_foreign(const Sequence& seq) const {
  int64_t first = kNoToken;
  for (size_t g = 0; g < memory_.groups.size(); ++g)
    for (int64_t j = seq.first_held[g]; j < static_cast<int64_t>(seq.pages[g].size()); ++j)
      if (pools_[g].foreign(seq.pages[g][j])) first = std::min(first, j * kPageTokens);
  return first;
}

void KvCache::release(PageTables& tables, float retention_priority) {
  for (size_t g = 0; g < tables.pages.size(); ++g)
    for (int64_t j = static_cast<int64_t>(tables.pages[g].size()); j-- > 0;) {
      const int32_t page = std::exchange(tables.pages[g][j], -1);
      if (page >= 0) pools_[g].release(page, retention_priority);
    }
}

bool KvCache::copies_tail(const Sequence& seq, int group) const {
  const auto& table = seq.pages[group];
  const int64_t tail = seq.written / kPageTokens;
  return tail < static_cast<int64_t>(table.size()) && !pools_[group].writable(table[tail]);
}

int64_t KvCache::taken_by_write(const Sequence& seq, int group, int64_t tokens) const {
  const auto held = static_cast<int64_t>(seq.pages[group].size());
  return std::max<int64_t>(0, pages_of(seq.written + tokens) - held) + copies_tail(seq, group);
}

int64_t KvCache::writable_tokens(const Sequence& seq, int64_t most) const {
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    const int64_t pages = pools_[g].available() - copies_tail(seq, static_cast<int>(g));
    if (pages < 0) return 0;
    const int64_t end = (static_cast<int64_t>(seq.pages[g].size()) + pages) * kPageTokens;
    most = std::min(most, end - seq.written);
  }
  return most;
}

void KvCache::add_taken(const Sequence& seq, int64_t tokens, std::vector<int64_t>& pages) const {
  for (size_t g = 0; g < memory_.groups.size(); ++g)
    pages[g] += taken_by_write(seq, static_cast<int>(g), tokens);
}

bool KvCache::has_available(const std::vector<int64_t>& pages) const {
  for (size_t g = 0; g < memory_.groups.size(); ++g)
    if (pages[g] > pools_[g].available()) return false;
  return true;
}

void KvCache::add_outstanding(const Sequence& seq, std::vector<int64_t>& promised,
                              int64_t growth) const {
  const int64_t tokens = seq.length() + 1 + growth;
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    const int64_t held = static_cast<int64_t>(seq.pages[g].size()) - seq.first_held[g];
    promised[g] += std::max<int64_t>(0, pages_needed(memory_.groups[g], tokens) - held);
  }
}

bool KvCache::can_hold(const Sequence& seq, const std::vector<int64_t>& promised) const {
  std::vector<int64_t> needed = promised;
  add_outstanding(seq, needed);
  return has_available(needed) && can_write(seq, 1);
}

void KvCache::prepare_write(Sequence& seq, int64_t tokens) {
  const int64_t end = pages_of(seq.written + tokens), tail = seq.written / kPageTokens;
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    const int group = static_cast<int>(g);
    auto& table = seq.pages[g];
    if (static_cast<int64_t>(table.capacity()) < end) table.reserve(2 * end);
    if (tail < static_cast<int64_t>(table.size()) && !pools_[g].writable(table[tail])) {
      const int32_t copy = pools_[g].take();
      try {
        memory_.copy(group, table[tail], copy);
      } catch (...) {
        pools_[g].release(copy, PagePool::kOutOfReach);
        throw;
      }
      pools_[g].release(table[tail], seq.retention_priority);
      table[tail] = copy;
    }
    while (static_cast<int64_t>(table.size()) < end) table.push_back(pools_[g].take());
  }
}

void KvCache::commit_write(Sequence& seq, int64_t tokens) {
  seq.written += tokens;
  if (prefix_reuse_) seal(seq);
  release_out_of_reach(seq);
}

void KvCache::seal(Sequence& seq) {
  const int64_t full = seq.written / kPageTokens;
  extend_keys(seq, full);
  for (; seq.sealed < full; ++seq.sealed) {
    const PageIdentity id = identity(seq, seq.sealed);
    for (size_t g = 0; g < memory_.groups.size(); ++g) {
      int32_t& page = seq.pages[g][seq.sealed];
      if (page < 0 || pools_[g].sealed(page)) continue;
      pools_[g].set_foreign(page, (seq.sealed + 1) * kPageTokens > seq.foreign_from);
      page = settle(static_cast<int>(g), page, id, seq.retention_priority);
    }
  }
}

int32_t KvCache::settle(int group, int32_t page, const PageIdentity& identity,
                        float retention_priority) {
  PagePool& pool = pools_[group];
  const int32_t present = pool.find(identity);
  if (present >= 0 && (pool.foreign(page) || !pool.foreign(present))) {
    // Batch-invariant arithmetic gave both the same bits, so one of the two is enough.
    pool.reference(present);
    pool.release(page, retention_priority);
    return present;
  }
  if (present >= 0) pool.forget(present);
  pool.seal(page, identity);
  return page;
}

void KvCache::release_out_of_reach(Sequence& seq) {
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    const int group = static_cast<int>(g);
    const int64_t first = first_needed(group, seq.written);
    while (seq.first_held[g] < std::min<int64_t>(first, seq.pages[g].size())) {
      const int64_t page = seq.first_held[g]++;
      const float priority =
          restarts_turn(seq, group, page) ? seq.retention_priority : PagePool::kOutOfReach;
      release_entry(seq, group, page, priority);
    }
  }
}

// Returns whether a query reaches the page from the page border where the last turn or its reply
// would be computed again. The last token before a reply always is.
bool KvCache::restarts_turn(const Sequence& seq, int group, int64_t page) const {
  const auto reached = [&](int64_t end) {
    return page < end && page >= first_reachable(group, end * kPageTokens);
  };
  const LastTurn& turn = seq.last_turn;
  return reached(turn.begin / kPageTokens) || reached((turn.reply - 1) / kPageTokens);
}

void KvCache::release_entry(Sequence& seq, int group, int64_t page, float retention_priority) {
  int32_t& entry = seq.pages[group][page];
  if (entry >= 0) pools_[group].release(entry, retention_priority);
  entry = -1;
}

void KvCache::trim(Sequence& seq) {
  const int64_t left = pages_of(seq.written);
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    auto& table = seq.pages[g];
    // The last page is released first, so that children are evicted before their parents.
    for (int64_t j = static_cast<int64_t>(table.size()); j-- > left;)
      release_entry(seq, static_cast<int>(g), j, seq.retention_priority);
    if (static_cast<int64_t>(table.size()) > left) table.resize(left);
    seq.first_held[g] = std::min(seq.first_held[g], left);
  }
}

Sequence KvCache::fork(const Sequence& seq) {
  Sequence copy = seq;
  for (size_t g = 0; g < memory_.groups.size(); ++g)
    for (int32_t page : copy.pages[g])
      if (page >= 0) pools_[g].reference(page);
  return copy;
}

void KvCache::lower_written(Sequence& seq, int64_t written) {
  if (written >= seq.written) return;
  seq.written = written;
  seq.sealed = std::min(seq.sealed, written / kPageTokens);
  seq.posted = std::min(seq.posted, seq.sealed);
  if (seq.foreign_from >= written) seq.foreign_from = kNoToken;
  // Pages that a window has released are found again by hash, or computed again.
  if (window_intact(seq)) {
    trim(seq);
  } else {
    drop_pages(seq);
  }
}

void KvCache::truncate(Sequence& seq, int64_t length) {
  lower_written(seq, length);
  seq.tokens.resize(length);
  seq.keys.resize(std::min<size_t>(seq.keys.size(), length / kPageTokens));
}

void KvCache::drop_pages(Sequence& seq) {
  seq.written = 0;
  seq.sealed = 0;
  seq.posted = 0;
  seq.foreign_from = kNoToken;
  trim(seq);
}

void KvCache::discard(Sequence& seq, int64_t from) {
  const int64_t first = from / kPageTokens;
  for (size_t g = 0; g < memory_.groups.size(); ++g)
    for (int64_t j = first; j < static_cast<int64_t>(seq.pages[g].size()); ++j) {
      const int32_t page = seq.pages[g][j];
      if (page >= 0 && pools_[g].sealed(page)) pools_[g].unseal(page);
    }
  if (first < static_cast<int64_t>(seq.keys.size()))
    discarded_.insert(discarded_.end(), seq.keys.begin() + first, seq.keys.end());
  lower_written(seq, first * kPageTokens);
}

void KvCache::forget(const std::vector<BlockHash>& keys) {
  for (PagePool& pool : pools_)
    for (const BlockHash& key : keys) pool.forget(key);
}

void KvCache::evict_all() {
  for (PagePool& pool : pools_) pool.evict_all();
}

int64_t KvCache::total() const {
  int64_t n = 0;
  for (const PagePool& pool : pools_) n += pool.total();
  return n;
}

int64_t KvCache::free() const {
  int64_t n = 0;
  for (const PagePool& pool : pools_) n += pool.free();
  return n;
}

int64_t KvCache::cached() const {
  int64_t n = 0;
  for (const PagePool& pool : pools_) n += pool.cached();
  return n;
}

void KvCache::check(const std::vector<const Sequence*>& sequences,
                    const std::vector<HeldPage>& held_pages) const {
  for (size_t g = 0; g < memory_.groups.size(); ++g) {
    std::vector<int32_t> held(pools_[g].total(), 0);
    for (const HeldPage& h : held_pages)
      if (h.group == static_cast<int>(g)) ++held[h.page];
    for (const Sequence* seq : sequences) {
      const auto& table = seq->pages[g];
      if (seq->written > seq->length())
        throw_error(ErrorCode::internal, "a sequence has ", seq->written, " written and ",
                    seq->length(), " committed tokens");
      if (static_cast<int64_t>(table.size()) != pages_of(seq->written))
        throw_error(ErrorCode::internal, "a sequence with ", seq->written,
                    " written tokens has a table of ", table.size(), " pages");
      for (int64_t j = 0; j < static_cast<int64_t>(table.size()); ++j) {
        if ((table[j] < 0) != (j < seq->first_held[g]))
          throw_error(ErrorCode::internal, "page ", j, " of a sequence is ", table[j],
                      ", the first one held is ", seq->first_held[g]);
        if (table[j] >= 0) ++held[table[j]];
      }
    }
    pools_[g].check(held);
  }
}

}  // namespace turbomind
