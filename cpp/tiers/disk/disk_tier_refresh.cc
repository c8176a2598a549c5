// Refresh of a disk tier: reads what other processes have changed in the folder into the catalog.
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "tiers/disk/disk_tier.h"

namespace turbomind {

namespace {

constexpr int64_t kLatestUse = int64_t{1} << 60;  // that is believed

// Lists the ids of the folder's segments and of payload files, sorted. Returns false when it cannot
// be read; `missing`: because it does not exist.
bool list_folder(const std::string& folder, std::vector<uint64_t>* segments,
                 std::vector<std::string>* payloads, bool* missing) {
  DIR* dir = opendir(folder.c_str());
  *missing = dir == nullptr && (errno == ENOENT || errno == ENOTDIR);
  if (dir == nullptr) return false;
  while (const dirent* entry = readdir(dir)) {
    const std::string name = entry->d_name;
    if (const uint64_t id = SegmentFile::id_of(name)) segments->push_back(id);
    if (name.size() == 19 && name.ends_with(".kv")) payloads->push_back(name.substr(0, 16));
  }
  closedir(dir);
  std::sort(segments->begin(), segments->end());
  return true;
}

// Removes payload files without an index: a process has crashed between two unlinks. The index of a
// new segment is created before its payloads.
void remove_orphans(const std::string& folder, const std::vector<uint64_t>& segments,
                    const std::vector<std::string>& payloads) {
  for (const std::string& name : payloads) {
    const uint64_t id = SegmentFile::id_of(name + ".idx");
    if (id == 0 || std::binary_search(segments.begin(), segments.end(), id)) continue;
    const std::string path = folder + "/" + name;
    struct stat s;
    if (lstat((path + ".idx").c_str(), &s) != 0 && errno == ENOENT) unlink((path + ".kv").c_str());
  }
}

}  // namespace

void DiskTier::refresh_locked() {
  std::vector<uint64_t> found;
  std::vector<std::string> payloads;
  bool missing = false;
  if (!list_folder(options_.folder, &found, &payloads, &missing) && !missing) return;
  remove_orphans(options_.folder, found, payloads);

  std::vector<uint64_t> left;
  for (auto& [id, segment] : segments_) {
    if (!std::binary_search(found.begin(), found.end(), id)) {
      left.push_back(id);
      continue;
    }
    switch (segment.file->changed()) {
      case SegmentFile::Status::good:
      case SegmentFile::Status::failed:
        break;
      case SegmentFile::Status::gone:
        left.push_back(id);
        break;
      case SegmentFile::Status::damaged:
        update(segment);
    }
  }
  for (const uint64_t id : left) drop(id);
  for (const uint64_t id : found) {
    if (!segments_.contains(id)) load(id);
  }
  for (auto& [id, segment] : segments_) {
    if (segment.stale) update(segment);
  }
}

void DiskTier::load(uint64_t id) {
  Segment segment;
  segment.file = std::make_shared<SegmentFile>(options_.folder, id);
  if (open_files() >= kMaxOpenSegments) close_idle_files(nullptr);
  SegmentFile::Scan scan;
  SegmentFile::Status status = segment.file->scan(&scan);
  if (status == SegmentFile::Status::failed) {  // such as too many open files
    close_idle_files(nullptr);
    status = segment.file->scan(&scan);
  }
  if (status == SegmentFile::Status::gone || status == SegmentFile::Status::failed) return;
  Segment* place = nullptr;
  {
    const std::lock_guard index(index_);
    place = &segments_.emplace(id, std::move(segment)).first->second;
  }
  if (status == SegmentFile::Status::damaged && place->file->kind() == SegmentFile::Kind::damaged)
    scan.damaged = 1;
  apply(*place, std::move(scan));
}

// Scans the segment's index again.
void DiskTier::update(Segment& segment) {
  segment.stale = false;
  SegmentFile::Scan scan;
  const auto status = segment.file->scan(&scan);
  if (status == SegmentFile::Status::failed || status == SegmentFile::Status::gone) return;
  if (segment.file->kind() == SegmentFile::Kind::damaged) scan.damaged = segment.damaged + 1;
  apply(segment, std::move(scan));
}

// Lookups pass between records; only calls with io_ held add or remove what is iterated over here.
void DiskTier::apply(Segment& segment, SegmentFile::Scan scan) {
  const uint64_t id = segment.file->id();
  std::set<uint64_t> alive;
  for (const SegmentFile::Found& found : scan.records)
    if (!found.record.dead) alive.insert(found.offset);
  {
    const std::lock_guard index(index_);
    forget_stale_copies(id);
    for (const SegmentFile::Found& found : scan.records) {
      if (!found.record.dead) take(segment, found);
      index_.pass();
    }
    std::vector<CatalogPage*> left;
    for (const auto& [offset, page] : segment.pages) {
      if (!alive.contains(offset)) left.push_back(page);
      index_.pass();
    }
    for (CatalogPage* page : left) {
      forget(page);
      index_.pass();
    }
    stats_.damaged += std::max<int64_t>(0, scan.damaged - segment.damaged);
    segment.damaged = scan.damaged;
  }
  if (segment.file->owned()) kill_own_stale_copies(id);
}

// With index_ held. Forgets the stale copies in a segment.
void DiskTier::forget_stale_copies(uint64_t segment) {
  for (auto it = stale_copies_.begin(); it != stale_copies_.end(); index_.pass())
    it = it->second.segment == segment ? stale_copies_.erase(it) : std::next(it);
}

// Takes a live record: one in the catalog, a new one, or one of a page that the catalog has from
// another place. Of two places every process uses the lower one, so that two processes do not
// remove both.
void DiskTier::take(Segment& segment, const SegmentFile::Found& found) {
  CatalogPage page = describe(found.record.page);
  page.last_use = found.record.last_use;
  page.segment = segment.file->id();
  page.offset = found.offset;
  page.payload_offset = found.record.payload_offset;
  page.disk_bytes = SegmentFile::disk_bytes(page.payload_bytes) + found.bytes;

  // After the clock was set back, pages that are used now still count as used last.
  clock_ = std::max(clock_, std::min(page.last_use, kLatestUse));

  if (const auto at = segment.pages.find(found.offset); at != segment.pages.end()) {
    CatalogPage* known = at->second;
    if (known->key == page.key && known->group == page.group) {
      if (page.last_use > known->last_use) {
        catalog_.set_use(known, page.retention_priority, page.last_use);
        known->unsaved = false;
      }
      return;
    }
    forget(known);
  }
  if (CatalogPage* other = catalog_.find(page.key, page.group)) {
    if (std::pair(other->segment, other->offset) < std::pair(page.segment, page.offset)) {
      stale_copies_.emplace(page.key, place_of(page));
      return;
    }
    const StaleCopy old = place_of(*other);
    forget(other);
    stale_copies_.emplace(page.key, old);
  }
  enter(segment, std::move(page));
}

CatalogPage* DiskTier::enter(Segment& segment, CatalogPage page) {
  CatalogPage* entered = catalog_.insert(std::move(page));
  const auto bytes = static_cast<int64_t>(entered->disk_bytes);
  segment.pages[entered->offset] = entered;
  segment.live_bytes += bytes;
  stats_.bytes += bytes;
  return entered;
}

void DiskTier::forget(CatalogPage* page) {
  Segment& segment = segments_.at(page->segment);
  const auto bytes = static_cast<int64_t>(page->disk_bytes);
  segment.pages.erase(page->offset);
  segment.live_bytes -= bytes;
  stats_.bytes -= bytes;
  const auto [first, last] = stale_copies_.equal_range(page->key);
  for (auto it = first; it != last; ++it) {
    if (it->second.group == page->group) segments_.at(it->second.segment).stale = true;
  }
  catalog_.erase(page);
}

// Drops a segment whose files have been removed.
void DiskTier::drop(uint64_t id) {
  const std::lock_guard index(index_);
  Segment& segment = segments_.at(id);
  for (; !segment.pages.empty(); index_.pass()) forget(segment.pages.begin()->second);
  forget_stale_copies(id);
  if (own_ == segment.file) {
    for (const Move& move : moved_) {  // they are at their old places
      const auto from = segments_.find(move.from.segment);
      if (from != segments_.end()) from->second.stale = true;
    }
    moved_.clear();
    own_->disown();
    own_.reset();
  }
  segments_.erase(id);
}

int DiskTier::open_files() const {
  const std::lock_guard index(index_);
  return static_cast<int>(std::count_if(segments_.begin(), segments_.end(), [](const auto& item) {
    return item.second.file->is_open();
  }));
}

void DiskTier::close_idle_files(const SegmentFile* except) {
  const std::lock_guard index(index_);
  for (auto& [id, segment] : segments_) {
    if (segment.file.get() != except) segment.file->close_files();
  }
}

}  // namespace turbomind
