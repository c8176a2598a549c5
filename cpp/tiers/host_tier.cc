#include "tiers/host_tier.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_set>

namespace turbomind {

namespace {

// Memory is divided into pieces, so that pages of any size share it without fragmentation. A full
// page is a whole number of pieces.
size_t piece_bytes(size_t page_bytes) {
  constexpr size_t kPieces = 16, kAlign = 64;
  const size_t piece = (page_bytes + kPieces - 1) / kPieces;
  return std::max(kAlign, (piece + kAlign - 1) / kAlign * kAlign);
}

constexpr size_t kMostUnreachable = 1 << 16;  // recorded

int64_t quota_pieces(int64_t quota, size_t piece_bytes) {
  return std::min<int64_t>(std::max<int64_t>(quota, 0) / static_cast<int64_t>(piece_bytes),
                           std::numeric_limits<uint32_t>::max());
}

int64_t slab_pieces(const HostMemory& memory, size_t piece_bytes, int64_t most) {
  const int64_t pieces = static_cast<int64_t>(memory.slab_bytes / piece_bytes);
  return std::max<int64_t>(memory.slab_bytes == 0 ? most : std::min(pieces, most), 1);
}

float orderable(float retention_priority) {
  return std::isnan(retention_priority) ? -std::numeric_limits<float>::infinity()
                                        : retention_priority;
}

}  // namespace

// An entry in use outside the lock. Destroyed before the tier.
struct HostTier::Borrowed final : BorrowedPage {
  Borrowed(HostTier& t, EntryPtr e) : tier(t), entry(std::move(e)) {}
  ~Borrowed() override { tier.end_use(*entry); }
  HostTier& tier;
  const EntryPtr entry;
};

HostTier::HostTier(const Options& options)
    : options_(options),
      piece_bytes_(piece_bytes(options.page_bytes)),
      most_pieces_(quota_pieces(options.quota, piece_bytes_)),
      slab_pieces_(slab_pieces(options.memory, piece_bytes_, most_pieces_)),
      reserve_pieces_(static_cast<int64_t>(options.memory.reserved_bytes / piece_bytes_)),
      total_pieces_(most_pieces_) {
  slabs_.reserve((most_pieces_ + slab_pieces_ - 1) / slab_pieces_);
  while (wants_slab()) add_slab(ready_);
  if (options.memory.slab_bytes > 0 || most_pieces_ == 0) return;
  slabs_.push_back(options.memory.allocate(static_cast<size_t>(most_pieces_) * piece_bytes_));
  ready_ = most_pieces_;
}

// Lookups

PageRef HostTier::ref_of(const Entry& entry) const {
  PageRef ref;
  ref.key = entry.key;
  ref.parent = entry.parent;
  ref.group = entry.group;
  ref.count = static_cast<int>(entry.tokens.size());
  ref.payload_bytes = entry.payload_bytes;
  ref.foreign = entry.foreign;
  ref.place[0] = entry.id;
  return ref;
}

std::optional<PageRef> HostTier::find(const BlockHash& key, int group) const {
  std::lock_guard lock(mutex_);
  const Entry* entry = names_.find(key, group);
  return entry ? std::optional(ref_of(*entry)) : std::nullopt;
}

std::optional<PageRef> HostTier::find_prefix(const BlockHash& parent, int group,
                                             const int32_t* tokens, int count, int* shared) const {
  std::lock_guard lock(mutex_);
  const Entry* entry = names_.find_prefix(parent, group, tokens, count, shared);
  return entry ? std::optional(ref_of(*entry)) : std::nullopt;
}

TierStats HostTier::stats() const {
  std::lock_guard lock(mutex_);
  TierStats stats = counts_;
  stats.pages = static_cast<int64_t>(entries_.size());
  stats.bytes = (fresh_ - static_cast<int64_t>(free_.size())) * static_cast<int64_t>(piece_bytes_);
  stats.quota = options_.quota;
  return stats;
}

// Payloads: copied without the lock. Pieces that are read or written are not reused.

std::unique_ptr<BorrowedPage> HostTier::borrow(const PageRef& ref) {
  std::unique_ptr<Borrowed> borrowed;
  float priority;
  {
    std::lock_guard lock(mutex_);
    const auto it = entries_.find(ref.place[0]);
    if (it == entries_.end()) return nullptr;
    Entry& entry = *it->second;
    if (!(entry.key == ref.key) || entry.group != ref.group ||
        entry.payload_bytes != ref.payload_bytes)
      return nullptr;
    borrowed = borrow_entry(it->second);
    ++counts_.reads;
    priority = entry.priority;
    use(entry, priority);
  }
  borrowed->page = *borrowed->entry;
  borrowed->page.retention_priority = priority;
  return borrowed;
}

bool HostTier::read(const PageRef& ref, StoredPage* page, uint8_t* payload) {
  const std::unique_ptr<BorrowedPage> borrowed = borrow(ref);
  if (!borrowed) return false;
  for (const PayloadPart& part : borrowed->parts) {
    std::memcpy(payload, part.data, part.bytes);
    payload += part.bytes;
  }
  *page = std::move(borrowed->page);
  return true;
}

// Called with mutex_ held. Adjacent pieces become one part.
std::unique_ptr<HostTier::Borrowed> HostTier::borrow_entry(EntryPtr entry) {
  std::vector<PayloadPart> parts;
  for (size_t i = 0; i < entry->pieces.size(); ++i) {
    uint8_t* const at = piece(entry->pieces[i]);
    const size_t bytes = std::min(piece_bytes_, entry->payload_bytes - i * piece_bytes_);
    if (!parts.empty() && parts.back().data + parts.back().bytes == at)
      parts.back().bytes += bytes;
    else
      parts.push_back({at, bytes});
  }
  ++entry->users;
  std::unique_ptr<Borrowed> borrowed;
  try {
    borrowed = std::make_unique<Borrowed>(*this, entry);
  } catch (...) {
    --entry->users;
    throw;
  }
  borrowed->parts = std::move(parts);
  return borrowed;
}

void HostTier::end_use(Entry& entry) noexcept {
  std::lock_guard lock(mutex_);
  if (--entry.users == 0 && !entry.listed) release(entry);
}

bool HostTier::well_formed(const StoredPage& page) const {
  const size_t count = page.tokens.size();
  return page.group >= 0 && static_cast<size_t>(page.group) < options_.groups.size() &&
         count >= 1 && count <= kPageTokens && page.payload_bytes > 0 &&
         page.key == next_key(page.parent, page.tokens.data(), static_cast<int>(count));
}

HostTier::EntryPtr HostTier::make_entry(const StoredPage& page) const {
  auto entry = std::make_shared<Entry>();
  static_cast<StoredPage&>(*entry) = page;
  entry->foreign = page.numerics != options_.numerics;
  entry->priority = orderable(page.retention_priority);
  Order order;
  order.emplace(std::pair(entry->priority, uint64_t{0}), entry.get());
  entry->rank = order.extract(order.begin());
  return entry;
}

bool HostTier::write(const StoredPage& page, const uint8_t* payload) {
  bool there = false;
  const std::unique_ptr<Borrowed> borrowed = place(page, &there);
  if (!borrowed) return there;
  for (const PayloadPart& part : borrowed->parts) {
    std::memcpy(part.data, payload, part.bytes);
    payload += part.bytes;
  }
  return insert(*borrowed);
}

std::unique_ptr<BorrowedPage> HostTier::reserve(const StoredPage& page) {
  bool there = false;
  std::unique_ptr<Borrowed> borrowed = place(page, &there);
  if (borrowed) borrowed->page = page;
  return borrowed;
}

// Returns memory for a page; null when it is `there` already, when there is no room, and when it
// does not match its hash.
std::unique_ptr<HostTier::Borrowed> HostTier::place(const StoredPage& page, bool* there) {
  if (!well_formed(page)) {
    std::lock_guard lock(mutex_);
    ++counts_.damaged;
    return nullptr;
  }
  const EntryPtr entry = make_entry(page);
  for (;;) {
    int64_t ready;
    {
      std::lock_guard lock(mutex_);
      *there = has(*entry);
      if (*there || pieces_of(*entry) > total_pieces_) return nullptr;
      ready = ready_;
      if (room() >= pieces_of(*entry) || ready == total_pieces_) {
        if (!take_pieces(*entry)) return nullptr;
        try {
          return borrow_entry(entry);
        } catch (...) {
          release(*entry);
          throw;
        }
      }
    }
    add_slab(ready);
  }
}

// Allocates a slab after the first `ready` pieces, without the lock, since that can take long. When
// the system has no memory, the tier stays at its size.
void HostTier::add_slab(int64_t ready) {
  std::lock_guard growing(growing_);
  {
    std::lock_guard lock(mutex_);
    if (ready_ != ready) return;
  }
  const int64_t pieces = std::min(slab_pieces_, most_pieces_ - ready);
  HostBlock slab;
  try {
    slab = options_.memory.allocate(static_cast<size_t>(pieces) * piece_bytes_);
  } catch (const std::exception&) {
  }
  std::lock_guard lock(mutex_);
  if (slab) {
    slabs_.push_back(std::move(slab));
    ready_ += pieces;
  } else {
    total_pieces_ = ready_;
  }
}

void HostTier::maintain() {
  int64_t ready;
  {
    std::lock_guard lock(mutex_);
    if (!wants_slab()) return;
    ready = ready_;
  }
  add_slab(ready);
}

bool HostTier::insert(BorrowedPage& borrowed) {
  const EntryPtr& entry = static_cast<Borrowed&>(borrowed).entry;
  std::lock_guard lock(mutex_);
  // Another thread may have written the same page meanwhile.
  if (!has(*entry)) list(entry);
  return true;
}

// Bookkeeping

// Returns whether the page is there, so that it need not be written; it gets the higher priority.
bool HostTier::has(const Entry& entry) {
  Entry* there = names_.find(entry.key, entry.group);
  if (!there || (there->foreign && !entry.foreign)) return false;
  use(*there, std::max(there->priority, entry.priority));
  return true;
}

int64_t HostTier::pieces_of(const Entry& entry) const {
  return static_cast<int64_t>((entry.payload_bytes + piece_bytes_ - 1) / piece_bytes_);
}

// Evicts until there is room. Returns false when the rest has a higher priority or is in use.
bool HostTier::take_pieces(Entry& entry) {
  const int64_t need = pieces_of(entry);
  while (room() < need) {
    const auto victim = std::find_if(order_.begin(), order_.end(),
                                     [](const auto& rank) { return rank.second->users == 0; });
    if (victim == order_.end() || victim->second->priority > entry.priority) return false;
    if (unreachable(entry, *victim->second)) return false;
    unlist(*victim->second);
    ++counts_.evicted;
  }
  unreachable_.erase(entry.key);
  // All that may throw comes first; release() never allocates.
  entry.pieces.reserve(need);
  const size_t most = static_cast<size_t>(std::min(fresh_ + need, total_pieces_));
  if (free_.capacity() < most) free_.reserve(2 * most);
  for (; static_cast<int64_t>(entry.pieces.size()) < need && !free_.empty(); free_.pop_back())
    entry.pieces.push_back(free_.back());
  while (static_cast<int64_t>(entry.pieces.size()) < need)
    entry.pieces.push_back(static_cast<uint32_t>(fresh_++));
  return true;
}

// Returns whether evicting `victim` would make `entry` unreachable: its parent is `victim`, or a
// page that was itself refused for this reason. Else a sequence larger than the tier would evict
// its own pages.
bool HostTier::unreachable(const Entry& entry, const Entry& victim) {
  if (options_.groups[entry.group] != CacheKind::full) return false;
  const bool before = victim.key == entry.parent && victim.group == entry.group;
  if (!before && (!unreachable_.contains(entry.parent) || names_.find(entry.parent, entry.group)))
    return false;
  if (unreachable_.size() >= kMostUnreachable) unreachable_.clear();
  unreachable_.insert(entry.key);
  return true;
}

// The last ones first, so that they are taken again in the order of their addresses.
void HostTier::release(Entry& entry) {
  free_.insert(free_.end(), entry.pieces.rbegin(), entry.pieces.rend());
  entry.pieces.clear();
}

// Replaces a foreign page, if there is one.
void HostTier::list(const EntryPtr& entry) {
  if (Entry* before = names_.find(entry->key, entry->group)) unlist(*before);
  entry->id = ++clock_;
  try {
    entries_.emplace(entry->id, entry);
    names_.insert(entry.get());
  } catch (...) {
    entries_.erase(entry->id);
    throw;  // the Borrowed object releases it
  }
  entry->listed = true;
  ++counts_.writes;
  use(*entry, entry->priority);
  if (Entry* parent = names_.find(entry->parent, entry->group)) rank(*parent);
}

// Its memory is released at once, or by its last user.
void HostTier::unlist(Entry& entry) {
  const EntryPtr alive = entries_.find(entry.id)->second;
  if (entry.rank.empty()) entry.rank = order_.extract({entry.priority, entry.last_use});
  entry.listed = false;
  names_.erase(&entry);
  entries_.erase(entry.id);
  if (entry.users == 0) release(entry);
  if (Entry* parent = names_.find(entry.parent, entry.group)) rank(*parent);
}

void HostTier::use(Entry& entry, float priority) {
  if (entry.rank.empty()) entry.rank = order_.extract({entry.priority, entry.last_use});
  entry.priority = priority;
  entry.last_use = ++clock_;
  rank(entry);
}

void HostTier::rank(Entry& entry) {
  const bool stays =
      options_.groups[entry.group] == CacheKind::full && names_.followed(entry.key, entry.group);
  if (stays && entry.rank.empty()) {
    entry.rank = order_.extract({entry.priority, entry.last_use});
  } else if (!stays && !entry.rank.empty()) {
    entry.rank.key() = {entry.priority, entry.last_use};
    order_.insert(std::move(entry.rank));
  }
}

// Lists of keys: the lock is taken separately for each key, so that lookups do not wait long.

void HostTier::touch(const std::vector<BlockHash>& keys, float retention_priority) {
  for (const BlockHash& key : keys) {
    std::lock_guard lock(mutex_);
    for (Entry* entry : names_.find_all(key)) use(*entry, orderable(retention_priority));
  }
}

void HostTier::remove(const std::vector<BlockHash>& keys) {
  for (const BlockHash& key : keys) {
    std::lock_guard lock(mutex_);
    for (Entry* entry : names_.followers(key))
      if (entry->tokens.size() < kPageTokens) unlist(*entry);
    for (Entry* entry : names_.find_all(key)) unlist(*entry);
  }
}

void HostTier::retain_only(const std::vector<BlockHash>& keys) {
  const std::unordered_set<BlockHash> retained(keys.begin(), keys.end());
  std::vector<uint64_t> ids;
  {
    std::lock_guard lock(mutex_);
    ids.reserve(entries_.size());
    for (const auto& [id, entry] : entries_) ids.push_back(id);
  }
  for (uint64_t id : ids) {
    std::lock_guard lock(mutex_);
    const auto it = entries_.find(id);
    if (it == entries_.end()) continue;
    const Entry& entry = *it->second;
    const bool partial = entry.tokens.size() < kPageTokens;
    if (!retained.contains(entry.key) && !(partial && retained.contains(entry.parent)))
      unlist(*it->second);
  }
}

}  // namespace turbomind
