#include "tiers/page_saver.h"

#include <algorithm>
#include <utility>

namespace turbomind {

namespace {
constexpr int kMostMoves = 8;             // in flight; of a small pool at most an eighth
constexpr size_t kMostUnsaved = 1 << 14;  // recorded
}  // namespace

PageSaver::PageSaver(KvCache& kv, const Model& model, PageMover& mover,
                     const PendingRemovals& removals)
    : kv_(kv),
      model_(model),
      mover_(mover),
      removals_(removals),
      foreign_numerics_(model.numerics_fingerprint() + "+") {
  for (size_t g = 0; g < kv.groups(); ++g) {
    const int64_t eighth = kv.pool(static_cast<int>(g)).total() / 8;
    const int most = static_cast<int>(std::clamp<int64_t>(eighth, 1, kMostMoves));
    limit_ = g == 0 ? most : std::min(limit_, most);
  }
}

// A page is saved when the lowest tier has it; the others may have evicted it.
bool PageSaver::in_lowest(const BlockHash& key, int group, bool foreign) const {
  const auto ref = mover_.tiers().back()->find(key, group);
  return ref && (foreign || !ref->foreign) && !removals_.pending(key, ref->parent, ref->count);
}

// Returns whether the lowest tier has the page, or a longer one with the same first tokens.
bool PageSaver::in_lowest(const BlockHash& key, const Unsaved& page, int group) const {
  if (in_lowest(key, group, true)) return true;
  const int count = static_cast<int>(page.tokens.size());
  if (count == 0) return false;
  int shared = 0;
  const auto ref =
      mover_.tiers().back()->find_prefix(page.parent, group, page.tokens.data(), count, &shared);
  return ref && shared == count && !removals_.pending(ref->key, ref->parent, ref->count);
}

void PageSaver::record_unsaved(const Item& item, int group) noexcept {
  try {
    if (unsaved_.size() >= kMostUnsaved) return;  // enough for a report
    Unsaved& page = unsaved_[item.identity.key];
    page.parent = item.identity.parent;
    const auto tokens = item.identity.tokens.begin();
    if (item.count < kPageTokens) page.tokens.assign(tokens, tokens + item.count);
    page.groups.resize(kv_.groups());
    page.groups[group] = true;
  } catch (const std::bad_alloc&) {  // it is counted all the same
  }
}

std::vector<BlockHash> PageSaver::unsaved() {
  std::vector<BlockHash> keys;
  for (auto it = unsaved_.begin(); it != unsaved_.end();) {
    auto& [key, page] = *it;
    bool any = false;
    for (size_t g = 0; g < page.groups.size(); ++g) {
      page.groups[g] = page.groups[g] && !in_lowest(key, page, static_cast<int>(g));
      any = any || page.groups[g];
    }
    if (any) keys.push_back(key);
    it = any ? std::next(it) : unsaved_.erase(it);
  }
  return keys;
}

void PageSaver::post_sealed(Sequence& seq) {
  kv_.extend_keys(seq, seq.sealed);
  for (; seq.posted < seq.sealed; ++seq.posted) post_full(seq, seq.posted, false);
}

void PageSaver::post_all(Sequence& seq) {
  if (!kv_.prefix_reuse()) return;
  seq.posted = 0;
  post_sealed(seq);
  if (seq.written % kPageTokens > 0) post_tail(seq);
}

void PageSaver::post_offload(Sequence& seq) {
  kv_.extend_keys(seq, seq.sealed);
  for (int64_t page = 0; page < seq.sealed; ++page) post_full(seq, page, true);
}

void PageSaver::post_full(Sequence& seq, int64_t page, bool host_only) {
  const auto [entry, added] = known_.try_emplace(seq.keys[page], nullptr);
  if (!added) {
    Item& item = *entry->second;
    if (host_only || !item.host_only) return;
    item.host_only = false;
    item.again = item.open > 0;
    item.retention_priority = std::max(item.retention_priority, seq.retention_priority);
    return;
  }
  try {
    Item& item = queue_.emplace_back();
    item.identity = kv_.identity(seq, page);
    item.retention_priority = seq.retention_priority;
    item.host_only = host_only;
    item.number = ++last_;
    entry->second = &item;
  } catch (...) {
    known_.erase(seq.keys[page]);
    throw;
  }
}

void PageSaver::post_tail(Sequence& seq) {
  const int64_t page = seq.written / kPageTokens;
  kv_.extend_keys(seq, page);
  Item item;
  item.count = static_cast<int>(seq.written % kPageTokens);
  item.identity.parent = page == 0 ? seq.root : seq.keys[page - 1];
  const int32_t* tokens = seq.tokens.data() + page * kPageTokens;
  item.identity.key = next_key(item.identity.parent, tokens, item.count);
  std::copy_n(tokens, item.count, item.identity.tokens.data());
  item.retention_priority = seq.retention_priority;
  item.foreign = seq.foreign() > 0;
  bool everywhere = true;
  for (size_t g = 0; g < kv_.groups(); ++g) {
    item.tail.push_back(seq.pages[g][page]);
    everywhere = everywhere && in_lowest(item.identity.key, static_cast<int>(g), item.foreign);
  }
  if (everywhere) return;
  item.number = ++last_;
  item.held = true;
  queue_.push_back(std::move(item));
  for (size_t g = 0; g < kv_.groups(); ++g)
    kv_.pool(static_cast<int>(g)).reference(seq.pages[g][page]);
}

void PageSaver::pump() {
  while (moves_ < limit_ && !queue_.empty()) {
    Item& item = queue_.front();
    PageMover::Moves moves = moves_of(item);
    // Nothing throws from here on.
    if (moves.empty()) {
      drop(queue_.begin(), queue_);
      continue;
    }
    item.open = static_cast<int>(moves.size());
    item.held = false;
    moves_ += item.open;
    for (const auto& move : moves)
      if (item.tail.empty()) kv_.pool(move->record.group).reference(move->page);
    moving_.splice(moving_.end(), queue_, queue_.begin());
    mover_.post(std::move(moves));
  }
}

// Returns whether the tier that the item is for has its page.
bool PageSaver::stored(const Item& item, int group, bool foreign) const {
  if (!item.host_only) return in_lowest(item.identity.key, group, foreign);
  return mover_.tiers().front()->find(item.identity.key, group).has_value();
}

PageMover::Moves PageSaver::moves_of(Item& item) {
  PageMover::Moves moves;
  item.again = false;
  item.moves.clear();
  for (size_t g = 0; g < kv_.groups(); ++g) {
    const int group = static_cast<int>(g);
    const bool full = item.tail.empty();
    const int32_t page = full ? kv_.pool(group).find(item.identity) : item.tail[g];
    if (page < 0) {  // evicted, or out of the window's reach
      const bool needed = kv_.group(group).kind != CacheKind::window;
      if (needed && !item.host_only && !in_lowest(item.identity.key, group, true))
        record_unsaved(item, group);
      continue;
    }
    const bool foreign = full ? kv_.pool(group).foreign(page) : item.foreign;
    if (full && stored(item, group, foreign)) continue;
    moves.push_back(move_of(item, group, page));
    moves.back()->record.numerics = foreign ? foreign_numerics_ : model_.numerics_fingerprint();
  }
  item.moves.assign(moves.begin(), moves.end());
  return moves;
}

std::shared_ptr<PageMove> PageSaver::move_of(Item& item, int group, int32_t page) const {
  auto move = std::make_shared<PageMove>();
  move->kind = PageMove::Kind::save;
  move->page = page;
  move->owner = &item;
  move->host_only = item.host_only;
  StoredPage& record = move->record;
  record.key = item.identity.key;
  record.parent = item.identity.parent;
  record.group = group;
  record.fingerprint = model_.fingerprint();
  record.tokens.assign(item.identity.tokens.begin(), item.identity.tokens.begin() + item.count);
  record.payload_bytes = model_.pages().stored_page_bytes(group, item.count);
  record.retention_priority = item.retention_priority;
  return move;
}

void PageSaver::drop(Items::iterator item, Items& from) noexcept {
  if (item->tail.empty()) known_.erase(item->identity.key);
  if (item->held)
    for (size_t g = 0; g < item->tail.size(); ++g)
      kv_.pool(static_cast<int>(g)).release(item->tail[g], item->retention_priority);
  from.erase(item);
}

void PageSaver::finish(PageMove& move) noexcept {
  Item* item = static_cast<Item*>(move.owner);
  saved_ += move.succeeded;
  if (!item) return;  // revoked
  const bool lost = !move.succeeded && !move.host_only;
  failed_ += lost;
  if (lost) record_unsaved(*item, move.record.group);
  kv_.pool(move.record.group).release(move.page, item->retention_priority);
  move.owner = nullptr;
  --moves_;
  if (--item->open > 0) return;
  const auto same = [item](const Item& i) { return &i == item; };
  const auto at = std::find_if(moving_.begin(), moving_.end(), same);
  if (item->again || replaced(*item))
    queue_again(at);
  else
    drop(at, moving_);
}

// Returns whether foreign KV was saved of a full page that has been computed exactly meanwhile. It
// was not queued again then, since its hash was in known_.
bool PageSaver::replaced(const Item& item) const noexcept {
  if (!item.tail.empty()) return false;
  return std::any_of(item.moves.begin(), item.moves.end(), [&](const auto& move) {
    const PagePool& pool = kv_.pool(move->record.group);
    const int32_t page = pool.find(item.identity);
    return move->record.numerics == foreign_numerics_ && page >= 0 && !pool.foreign(page);
  });
}

// Queues the page under its number, so that a flush of that number waits for the exact page too.
void PageSaver::queue_again(Items::iterator item) noexcept {
  const auto later = [item](const Item& i) { return i.number > item->number; };
  queue_.splice(std::find_if(queue_.begin(), queue_.end(), later), moving_, item);
}

bool PageSaver::revoke(Item& item) noexcept {
  bool any = false;
  for (const auto& move : item.moves) {
    if (!move->owner) continue;
    mover_.revoke(*move);
    kv_.pool(move->record.group).release(move->page, item.retention_priority);
    move->owner = nullptr;
    --moves_;
    any = true;
  }
  item.open = 0;
  return any;
}

bool PageSaver::release_held() noexcept {
  bool any = false;
  while (!moving_.empty()) {
    const auto item = std::prev(moving_.end());
    any = revoke(*item) || any;
    if (item->tail.empty()) {
      queue_.splice(queue_.begin(), moving_, item);
    } else {
      release_held(item, moving_);
    }
  }
  for (auto item = queue_.begin(); item != queue_.end();) {
    const auto next = std::next(item);
    if (!item->tail.empty()) {
      release_held(item, queue_);
      any = true;
    }
    item = next;
  }
  return any;
}

// Queues the unfinished page.
void PageSaver::release_held(Items::iterator item, Items& from) noexcept {
  for (size_t g = 0; g < item->tail.size(); ++g) record_unsaved(*item, static_cast<int>(g));
  drop(item, from);
}

void PageSaver::forget(const PendingRemovals& removals) noexcept {
  std::erase_if(unsaved_, [&](const auto& entry) {
    const auto& [key, page] = entry;
    const int count = page.tokens.empty() ? kPageTokens : static_cast<int>(page.tokens.size());
    return removals.pending(key, page.parent, count);
  });
  for (Items* items : {&queue_, &moving_})
    for (auto item = items->begin(); item != items->end();) {
      const auto next = std::next(item);
      if (removals.pending(item->identity.key, item->identity.parent, item->count)) {
        revoke(*item);
        drop(item, *items);
      }
      item = next;
    }
}

uint64_t PageSaver::oldest() const {
  uint64_t oldest = last_ + 1;
  if (!queue_.empty()) oldest = queue_.front().number;
  for (const Item& item : moving_) oldest = std::min(oldest, item.number);
  return oldest;
}

void PageSaver::add_held(std::vector<HeldPage>& held) const {
  for (const Item& item : moving_)
    for (const auto& move : item.moves)
      if (move->owner) held.push_back({move->record.group, move->page});
  for (const Item& item : queue_)
    for (size_t g = 0; g < item.tail.size(); ++g)
      held.push_back({static_cast<int>(g), item.tail[g]});
}

}  // namespace turbomind
