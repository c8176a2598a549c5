// Compaction of a disk tier: removes segments with few live pages.
#include <algorithm>
#include <set>
#include <utility>

#include "tiers/disk/disk_room.h"
#include "tiers/disk/disk_tier.h"

namespace turbomind {

namespace {

constexpr int64_t kCopyBytesAtOnce = int64_t{64} << 20;
constexpr int kSmallSegments = 4;  // that may exist

bool unusable(const SegmentFile& file) {
  return file.kind() == SegmentFile::Kind::damaged || file.kind() == SegmentFile::Kind::unfinished;
}

}  // namespace

bool DiskTier::has_stale_copies(const Segment& segment) const {
  const uint64_t id = segment.file->id();
  return std::any_of(stale_copies_.begin(), stale_copies_.end(),
                     [&](const auto& item) { return item.second.segment == id; });
}

// Returns whether the segment has stale copies: one may be the last record of its page by now.
bool DiskTier::empty_of_pages(const Segment& segment) const {
  return segment.pages.empty() && !segment.stale && !has_stale_copies(segment);
}

bool DiskTier::is_small(const Segment& segment) const {
  return segment.file->payload_end() < static_cast<uint64_t>(segment_bytes_) / 8;
}

bool DiskTier::wants_compaction(const Segment& segment, int small) const {
  return segment.pages.empty() || has_stale_copies(segment) ||
         segment.live_bytes * 2 < static_cast<int64_t>(segment.file->payload_end()) ||
         (small > kSmallSegments && is_small(segment));
}

// Returns how many bytes may be copied at once: copies need room until the old places are removed.
int64_t DiskTier::compaction_budget() const {
  const auto room = disk_room(options_.folder);
  return room ? std::clamp<int64_t>(room->free - least_free_, 0, kCopyBytesAtOnce) : 0;
}

// Does a bounded piece of compaction, which copies at most `budget` bytes, and removes empty and
// unusable segments.
void DiskTier::tidy(int64_t budget) {
  if (own_ && own_->payload_end() > 0 && empty_of_pages(segments_.at(own_->id()))) release_own();
  tidy_unusable();
  int small = 0;
  std::vector<uint64_t> ids;
  for (const auto& [id, segment] : segments_) {
    small += is_small(segment) ? 1 : 0;
    ids.push_back(id);
  }
  for (const uint64_t id : ids) {
    const auto at = segments_.find(id);
    if (at == segments_.end()) continue;  // it was empty and the own segment
    Segment& segment = at->second;
    const bool ours = segment.file->kind() == SegmentFile::Kind::ours;
    if ((cannot_sync_ || budget <= 0) && !empty_of_pages(segment)) continue;
    if (!ours || !wants_compaction(segment, small) || !hold(segment)) continue;
    small -= is_small(segment) ? 1 : 0;
    budget -= compact(segment, budget);
    const bool empty = empty_of_pages(segment);
    if (empty) segment.file->unlink_files();
    segment.file->disown();
    if (empty) drop(id);
  }
}

// Removes segments that were not finished or cannot be read.
void DiskTier::tidy_unusable() {
  std::vector<uint64_t> ids;
  for (const auto& [id, segment] : segments_) {
    if (unusable(*segment.file)) ids.push_back(id);
  }
  for (const uint64_t id : ids) {
    Segment& segment = segments_.at(id);
    if (!hold(segment)) continue;
    const bool useless = unusable(*segment.file);
    if (useless) segment.file->unlink_files();
    segment.file->disown();
    if (useless) drop(id);
  }
}

// Moves live pages, up to `budget` bytes, to the own segment. Returns the bytes copied.
int64_t DiskTier::compact(Segment& segment, int64_t budget) {
  int64_t bytes = 0;
  std::vector<uint8_t> payload;
  std::vector<uint64_t> offsets;
  for (const auto& [offset, page] : segment.pages) offsets.push_back(offset);
  for (const uint64_t offset : offsets) {
    if (bytes >= budget || cannot_sync_) break;
    const auto at = segment.pages.find(offset);
    if (at == segment.pages.end()) continue;  // in the catalog from another place by now
    std::unique_lock index(index_);
    CatalogPage page = *at->second;
    index.unlock();
    bytes += static_cast<int64_t>(page.disk_bytes);
    if (!copy_page(std::move(page), &payload)) break;
  }
  finish_moves();
  return bytes;
}

// Marks the old places dead once the new ones are synced, while the own segment is still locked:
// the holder of a segment may remove records of which it finds another copy.
void DiskTier::finish_moves() {
  if (moved_.empty()) return;
  if (!sync_own()) return undo_moves();
  for (const Move& move : moved_) kill_record(move.from);
  moved_.clear();
}

// Marks the new places dead and returns the moved pages to their old places.
void DiskTier::undo_moves() {
  std::set<uint64_t> old;
  for (const Move& move : std::exchange(moved_, {})) {
    old.insert(move.from.segment);
    Segment& own = segments_.at(move.segment);
    const auto at = own.pages.find(move.offset);
    if (at != own.pages.end()) kill_here(at->second);
  }
  for (const uint64_t id : old) {
    if (const auto at = segments_.find(id); at != segments_.end()) update(at->second);
  }
}

// Returns false when nothing more can be written, or the page cannot be read now and stays.
bool DiskTier::copy_page(CatalogPage page, std::vector<uint8_t>* payload) {
  const StaleCopy old = place_of(page);
  PageRecord record;
  payload->resize(page.payload_bytes);
  const auto status = segments_.at(page.segment)
                          .file->read(page.offset, page.key, page.group, page.payload_bytes,
                                      DirectReader::Use::often, &record, payload->data());
  if (status == SegmentFile::Status::failed) return false;
  if (status != SegmentFile::Status::good) {
    PageRef ref = ref_of(page);
    forget_bad_locked(ref, old.segment, old.offset, status);
    return true;
  }
  record.page.retention_priority = page.retention_priority;
  record.last_use = page.last_use;
  page.unsaved = false;
  if (!place(&record, payload->data(), &page)) return false;
  // A segment that has the page too may have been adopted meanwhile.
  CatalogPage* known = catalog_.find(page.key, page.group);
  if (known != nullptr && known->segment == old.segment && known->offset == old.offset) {
    moved_.push_back({old, page.segment, page.offset});
    const std::lock_guard index(index_);
    forget(known);
    enter(segments_.at(page.segment), std::move(page));
  } else {
    kill_record(place_of(page));
  }
  return true;
}

}  // namespace turbomind
