// Removal and eviction of pages of a disk tier, and the choice of the segment it appends to.
#include <sys/stat.h>

#include <cerrno>
#include <set>
#include <utility>

#include "tiers/disk/disk_room.h"
#include "tiers/disk/disk_tier.h"

namespace turbomind {

namespace {

constexpr int kEvictionsAtOnce = 256;

}  // namespace

DiskTier::StaleCopy DiskTier::place_of(const CatalogPage& page) {
  const size_t record = page.disk_bytes - SegmentFile::disk_bytes(page.payload_bytes);
  return {page.group, page.segment, page.offset, page.payload_offset, page.payload_bytes, record};
}

// Removes all records of a page, from memory, then from the disk.
void DiskTier::kill(CatalogPage* page) {
  const BlockHash key = page->key;
  std::vector<StaleCopy> places = {place_of(*page)};
  {
    const std::lock_guard index(index_);
    const auto [first, last] = stale_copies_.equal_range(key);
    for (auto it = first; it != last;) {
      const bool same = it->second.group == places[0].group;
      if (same) places.push_back(it->second);
      it = same ? stale_copies_.erase(it) : std::next(it);
    }
    forget(page);
  }
  for (const StaleCopy& place : places) kill_record(place);
}

// Removes one record; other records of the page stay.
void DiskTier::kill_here(CatalogPage* page) {
  const StaleCopy place = place_of(*page);
  {
    const std::lock_guard index(index_);
    forget(page);
  }
  kill_record(place);
}

bool DiskTier::alive(const CatalogPage& page) {
  return segments_.at(page.segment).file->alive(page.offset, page.key, page.group);
}

// Marks the record first: a hole under a live record would count as damage. A file system that
// copies what is overwritten has no room for the mark when it is full, unless the hole comes first.
void DiskTier::kill_record(const StaleCopy& record) {
  const auto at = segments_.find(record.segment);
  if (at == segments_.end()) return;
  SegmentFile& file = *at->second.file;
  bool dead = file.mark_dead(record.offset, record.record_bytes);
  const bool is_full = !dead && lacks_room(errno);
  if (dead || is_full) file.punch(record.payload_offset, record.payload_bytes);
  if (is_full) dead = file.mark_dead(record.offset, record.record_bytes);
  if (dead) return;
  const std::lock_guard index(index_);
  ++stats_.write_errors;
}

// Removes stale copies in a segment that this instance holds; only the holder does that. A copy is
// redundant once the other record has been synced, since its writer may have crashed before. This
// waits for the disk, so index_ is not held; pages and stale copies stay under io_.
void DiskTier::kill_own_stale_copies(uint64_t id) {
  const auto other_of = [&](const auto& stale_copy) {
    const bool here = stale_copy.second.segment == id;
    return here ? catalog_.find(stale_copy.first, stale_copy.second.group) : nullptr;
  };
  std::map<uint64_t, bool> synced;  // segments
  for (const auto& stale_copy : stale_copies_) {
    const CatalogPage* other = other_of(stale_copy);
    if (other != nullptr && !synced.contains(other->segment))
      synced[other->segment] = segments_.at(other->segment).file->sync();
  }
  // The other record is read after all waiting and right before the mark: its holder may move it,
  // or remove it because this record exists.
  std::set<CatalogPage*> dead;
  for (auto it = stale_copies_.begin(); it != stale_copies_.end();) {
    CatalogPage* other = other_of(*it);
    const bool twice = other != nullptr && alive(*other);
    // Removed or moved meanwhile: the next refresh uses this record.
    if (other != nullptr && !twice) dead.insert(other);
    if (!twice || !synced.at(other->segment)) {
      ++it;
      continue;
    }
    const StaleCopy s = it->second;
    it = stale_copies_.erase(it);
    kill_record(s);
  }
  const std::lock_guard index(index_);
  for (CatalogPage* page : dead) forget(page);
}

// Room on the disk is made only after pages were written: while this instance is idle, what other
// programs take is theirs.
void DiskTier::evict() {
  int64_t bytes = std::exchange(wrote_, false) ? excess(0) : quota_ > 0 ? stats_.bytes - quota_ : 0;
  for (int i = 0; i < kEvictionsAtOnce && bytes > 0; ++i) {
    CatalogPage* page = next_victim();
    if (page == nullptr) return;
    bytes -= static_cast<int64_t>(page->disk_bytes);
    evict_page(page);
  }
}

void DiskTier::evict_page(CatalogPage* page) {
  kill(page);
  const std::lock_guard index(index_);
  ++stats_.evicted;
}

int64_t DiskTier::evict_bytes(int64_t bytes, const std::vector<BlockHash>& needed) {
  const std::unordered_set<BlockHash> stay(needed.begin(), needed.end());
  const std::lock_guard lock(io_);
  check_process();
  refresh_locked();
  int64_t removed = 0;
  while (removed < bytes) {
    std::unique_lock index(index_);
    CatalogPage* page = catalog_.least_valuable(&stay);
    index.unlock();
    if (page == nullptr) break;
    removed += static_cast<int64_t>(page->disk_bytes);
    evict_page(page);
  }
  tidy(0);
  return removed;
}

// Writes retention priorities and last uses to the records; failures do no harm.
void DiskTier::save_uses() {
  std::vector<CatalogPage> changed;
  {
    const std::lock_guard index(index_);
    catalog_.for_each([&](CatalogPage& page) {
      index_.pass();
      if (!page.unsaved) return;
      page.unsaved = false;
      CatalogPage copy;
      copy.key = page.key;
      copy.segment = page.segment, copy.offset = page.offset;
      copy.retention_priority = page.retention_priority, copy.last_use = page.last_use;
      changed.push_back(std::move(copy));
    });
  }
  for (const CatalogPage& page : changed) {
    SegmentFile& file = *segments_.at(page.segment).file;
    file.save_use(page.offset, page.retention_priority, page.last_use, page.key);
  }
}

// Locks a segment and scans it again, since no other process appends now.
bool DiskTier::hold(Segment& segment) {
  SegmentFile& file = *segment.file;
  if (file.owned() || !file.own()) return false;
  SegmentFile::Scan scan;
  const bool read = file.scan(&scan) != SegmentFile::Status::failed;
  if (!read || file.changed() == SegmentFile::Status::gone) {
    file.disown();
    return false;
  }
  if (file.kind() == SegmentFile::Kind::ours) {
    apply(segment, std::move(scan));
    file.cut_tail();
  }
  return true;
}

bool DiskTier::sync_own() {
  cannot_sync_ = !own_->sync();
  if (!cannot_sync_) return true;
  const std::lock_guard index(index_);
  ++stats_.write_errors;
  return false;
}

void DiskTier::release_own() {
  if (!own_) return;
  finish_moves();
  const auto at = segments_.find(own_->id());
  const bool empty = at == segments_.end() || empty_of_pages(at->second);
  if (empty) own_->unlink_files();
  own_->disown();
  const uint64_t id = own_->id();
  own_.reset();
  if (empty && at != segments_.end()) drop(id);
}

std::shared_ptr<SegmentFile> DiskTier::writable_segment(size_t bytes, bool fresh) {
  if (own_) {
    const bool full = own_->sync_failed() ||
                      (own_->payload_end() > 0 &&
                       (own_->payload_end() + bytes > static_cast<uint64_t>(segment_bytes_) ||
                        own_->index_bytes() + kMaxRecordBytes > SegmentFile::kMaxIndexBytes));
    const bool gone = own_->changed() == SegmentFile::Status::gone;
    if (!full && !gone) return own_;
    if (gone) {
      drop(own_->id());
    } else {
      sync_own();
      release_own();
    }
  }
  own_ = fresh ? nullptr : adopt(bytes);
  return own_ ? own_ : create_segment();
}

std::shared_ptr<SegmentFile> DiskTier::create_segment() {
  own_ = SegmentFile::create(options_.folder);
  if (!own_ && errno == ENOENT && mkdir(options_.folder.c_str(), 0700) == 0)
    own_ = SegmentFile::create(options_.folder);
  if (own_) {
    const std::lock_guard index(index_);
    Segment segment;
    segment.file = own_;
    segments_.insert_or_assign(own_->id(), std::move(segment));
  }
  return own_;
}

// Returns an unlocked segment with room, so that not every process leaves a new one.
std::shared_ptr<SegmentFile> DiskTier::adopt(size_t bytes) {
  const auto limit = static_cast<uint64_t>(segment_bytes_) / 4 * 3;
  for (auto& [id, segment] : segments_) {
    SegmentFile& file = *segment.file;
    const bool room = file.payload_end() + bytes <= limit && !file.sync_failed() &&
                      file.index_bytes() <= SegmentFile::kMaxIndexBytes / 4 * 3;
    if (file.kind() != SegmentFile::Kind::ours || !room || !hold(segment)) continue;
    if (file.payload_end() + bytes <= limit) return segment.file;
    file.disown();
  }
  return nullptr;
}

}  // namespace turbomind
