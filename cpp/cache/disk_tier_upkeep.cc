// How a disk tier follows its folder: other processes' changes, eviction, compaction.
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "cache/disk_tier.h"

namespace turbomind {

namespace {

constexpr int kMaxOpenSegments = 64;
constexpr int kEvictionsAtOnce = 256;
constexpr int64_t kCopyBytesAtOnce = int64_t{64} << 20;
constexpr int kSmallSegments = 4;  // that may lie about

// Ids of the folder's segments, and of payload files, sorted. False when it cannot be read;
// `missing` tells why.
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

// Payloads whose index is gone: whoever removed it died before the second unlink. A new segment's
// index is there before its payloads.
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
}

void DiskTier::load(uint64_t id) {
  Segment segment;
  segment.file = std::make_shared<SegmentFile>(options_.folder, id);
  if (open_files() >= kMaxOpenSegments) close_idle_files(nullptr);
  SegmentFile::Scan scan;
  SegmentFile::Status status = segment.file->scan(&scan);
  if (status == SegmentFile::Status::failed) {  // too many files are open, say
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

// Reads the segment's index again.
void DiskTier::update(Segment& segment) {
  SegmentFile::Scan scan;
  const auto status = segment.file->scan(&scan);
  if (status == SegmentFile::Status::failed || status == SegmentFile::Status::gone) return;
  if (segment.file->kind() == SegmentFile::Kind::damaged) scan.damaged = segment.damaged + 1;
  apply(segment, std::move(scan));
}

void DiskTier::apply(Segment& segment, SegmentFile::Scan scan) {
  const uint64_t id = segment.file->id();
  {
    const std::lock_guard index(index_);
    std::erase_if(shadows_, [&](const auto& item) { return item.second.segment == id; });
    std::set<uint64_t> alive;
    for (const SegmentFile::Found& found : scan.records) {
      if (found.record.dead) continue;
      alive.insert(found.offset);
      take(segment, found);
    }
    std::vector<CatalogPage*> left;
    for (const auto& [offset, page] : segment.pages) {
      if (!alive.contains(offset)) left.push_back(page);
    }
    for (CatalogPage* page : left) forget(page);
    stats_.damaged += std::max<int64_t>(0, scan.damaged - segment.damaged);
    segment.damaged = scan.damaged;
  }
  if (segment.file->owned()) kill_own_shadows(id);
}

// A live record: known, new, or of a page that is known from elsewhere. Of two places the lower
// one counts for every process, so that not each removes the other's.
void DiskTier::take(Segment& segment, const SegmentFile::Found& found) {
  CatalogPage page = describe(found.record.page);
  page.last_use = found.record.last_use;
  page.segment = segment.file->id();
  page.offset = found.offset;
  page.payload_offset = found.record.payload_offset;
  page.disk_bytes = SegmentFile::disk_bytes(page.payload_bytes) + found.bytes;

  if (const auto at = segment.pages.find(found.offset); at != segment.pages.end()) {
    CatalogPage* known = at->second;
    if (known->key == page.key && known->group == page.group) {
      if (page.last_use > known->last_use) {
        catalog_.set_use(known, page.keep_value, page.last_use);
        known->unsaved = false;
      }
      return;
    }
    forget(known);
  }
  const auto shadow = [](const CatalogPage& p) {
    return Shadow{p.group, p.segment, p.offset, p.payload_offset, p.payload_bytes};
  };
  if (CatalogPage* other = catalog_.find(page.key, page.group)) {
    if (std::pair(other->segment, other->offset) < std::pair(page.segment, page.offset)) {
      shadows_.emplace(page.key, shadow(page));
      return;
    }
    shadows_.emplace(other->key, shadow(*other));
    forget(other);
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
  catalog_.erase(page);
}

// Files that are gone from the folder.
void DiskTier::drop(uint64_t id) {
  const std::lock_guard index(index_);
  Segment& segment = segments_.at(id);
  while (!segment.pages.empty()) forget(segment.pages.begin()->second);
  std::erase_if(shadows_, [&](const auto& item) { return item.second.segment == id; });
  if (own_ == segment.file) {
    own_->disown();
    own_.reset();
  }
  segments_.erase(id);
}

// Removes a page from memory, then from the disk, wherever it lies.
void DiskTier::kill(CatalogPage* page) {
  const ChainKey key = page->key;
  std::vector<Shadow> places = {
      {page->group, page->segment, page->offset, page->payload_offset, page->payload_bytes}};
  {
    const std::lock_guard index(index_);
    forget(page);
    const auto [first, last] = shadows_.equal_range(key);
    for (auto it = first; it != last;) {
      const bool same = it->second.group == places[0].group;
      if (same) places.push_back(it->second);
      it = same ? shadows_.erase(it) : std::next(it);
    }
  }
  for (const Shadow& p : places)
    kill_record(p.segment, p.offset, p.payload_offset, p.payload_bytes);
}

// The mark first: a hole under a live record would count as damage.
void DiskTier::kill_record(uint64_t segment, uint64_t offset, uint64_t payload_offset,
                           size_t bytes) {
  const auto at = segments_.find(segment);
  if (at == segments_.end()) return;
  SegmentFile& file = *at->second.file;
  if (file.mark_dead(offset)) {
    file.punch(payload_offset, bytes);
    return;
  }
  const std::lock_guard index(index_);
  ++stats_.write_errors;
}

// Nobody else removes or moves records of a segment that this instance holds.
void DiskTier::kill_own_shadows(uint64_t id) {
  std::vector<Shadow> own;
  {
    const std::lock_guard index(index_);
    std::erase_if(shadows_, [&](const auto& item) {
      if (item.second.segment != id) return false;
      own.push_back(item.second);
      return true;
    });
  }
  for (const Shadow& s : own) kill_record(s.segment, s.offset, s.payload_offset, s.payload_bytes);
}

void DiskTier::evict() {
  for (int i = 0; i < kEvictionsAtOnce && options_.quota > 0 && stats_.bytes > options_.quota;
       ++i) {
    float keep_value = 0;
    CatalogPage* page = next_victim(&keep_value);
    if (page == nullptr) return;
    kill(page);
    const std::lock_guard index(index_);
    ++stats_.evicted;
  }
}

// Keep values and last uses go to the records; what cannot be written is of no importance.
void DiskTier::save_uses() {
  std::vector<CatalogPage> changed;
  {
    const std::lock_guard index(index_);
    catalog_.for_each([&](CatalogPage& page) {
      if (!page.unsaved) return;
      page.unsaved = false;
      CatalogPage copy;
      copy.key = page.key;
      copy.segment = page.segment, copy.offset = page.offset;
      copy.keep_value = page.keep_value, copy.last_use = page.last_use;
      changed.push_back(std::move(copy));
    });
  }
  for (const CatalogPage& page : changed) {
    SegmentFile& file = *segments_.at(page.segment).file;
    file.save_use(page.offset, page.keep_value, page.last_use, page.key);
  }
}

// Takes a segment's lock and looks at it again, now that nobody else appends.
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

void DiskTier::release_own() {
  if (!own_) return;
  const auto at = segments_.find(own_->id());
  const bool empty = at == segments_.end() || at->second.pages.empty();
  if (empty) own_->unlink_files();
  own_->disown();
  const uint64_t id = own_->id();
  own_.reset();
  if (empty && at != segments_.end()) drop(id);
}

std::shared_ptr<SegmentFile> DiskTier::writable_segment(size_t bytes, bool fresh) {
  if (own_) {
    const bool full = own_->payload_end() > 0 &&
                      (own_->payload_end() + bytes > static_cast<uint64_t>(segment_bytes_) ||
                       own_->index_bytes() + kMaxRecordBytes > SegmentFile::kMaxIndexBytes);
    const bool gone = own_->changed() == SegmentFile::Status::gone;
    if (!full && !gone) return own_;
    if (gone) {
      drop(own_->id());
    } else {
      own_->sync();
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

// A segment with room that nobody holds, so that each run of a program does not leave one.
std::shared_ptr<SegmentFile> DiskTier::adopt(size_t bytes) {
  const auto limit = static_cast<uint64_t>(segment_bytes_) / 4 * 3;
  for (auto& [id, segment] : segments_) {
    SegmentFile& file = *segment.file;
    const bool room = file.payload_end() + bytes <= limit &&
                      file.index_bytes() <= SegmentFile::kMaxIndexBytes / 4 * 3;
    if (file.kind() != SegmentFile::Kind::ours || !room || !hold(segment)) continue;
    if (file.payload_end() + bytes <= limit) return segment.file;
    file.disown();
  }
  return nullptr;
}

bool DiskTier::is_small(const Segment& segment) const {
  return segment.file->payload_end() < static_cast<uint64_t>(segment_bytes_) / 8;
}

bool DiskTier::wants_compaction(const Segment& segment, int small) const {
  const auto id = segment.file->id();
  const bool shadowed = std::any_of(shadows_.begin(), shadows_.end(),
                                    [&](const auto& item) { return item.second.segment == id; });
  return segment.pages.empty() || shadowed ||
         segment.live_bytes * 2 < static_cast<int64_t>(segment.file->payload_end()) ||
         (small > kSmallSegments && is_small(segment));
}

// A bounded piece of compaction, and the removal of segments nobody can use.
void DiskTier::tidy() {
  if (own_ && own_->payload_end() > 0 && segments_.at(own_->id()).pages.empty()) release_own();
  tidy_damaged();
  int small = 0;
  std::vector<uint64_t> ids;
  for (const auto& [id, segment] : segments_) {
    small += is_small(segment) ? 1 : 0;
    ids.push_back(id);
  }
  int64_t budget = kCopyBytesAtOnce;
  for (const uint64_t id : ids) {
    if (budget <= 0) return;
    const auto at = segments_.find(id);
    if (at == segments_.end()) continue;  // it was empty, and the own one
    Segment& segment = at->second;
    const bool ours = segment.file->kind() == SegmentFile::Kind::ours;
    if (!ours || !wants_compaction(segment, small) || !hold(segment)) continue;
    small -= is_small(segment) ? 1 : 0;
    budget -= compact(segment, budget);
    const bool empty = segment.pages.empty();
    if (empty) segment.file->unlink_files();
    segment.file->disown();
    if (empty) drop(id);
  }
}

void DiskTier::tidy_damaged() {
  std::vector<uint64_t> ids;
  for (const auto& [id, segment] : segments_) {
    if (segment.file->kind() == SegmentFile::Kind::damaged) ids.push_back(id);
  }
  for (const uint64_t id : ids) {
    Segment& segment = segments_.at(id);
    if (!hold(segment)) continue;
    const bool damaged = segment.file->kind() == SegmentFile::Kind::damaged;
    if (damaged) segment.file->unlink_files();
    segment.file->disown();
    if (damaged) drop(id);
  }
}

// Moves what lives, up to `budget` bytes, to the own segment. The old places die once the new ones
// are on the disk. Returns the bytes copied.
int64_t DiskTier::compact(Segment& segment, int64_t budget) {
  std::vector<Shadow> copied;
  const int64_t bytes = copy_pages(segment, budget, &copied);
  if (copied.empty()) return bytes;
  if (own_) own_->sync();
  for (const Shadow& s : copied)
    kill_record(s.segment, s.offset, s.payload_offset, s.payload_bytes);
  return bytes;
}

int64_t DiskTier::copy_pages(Segment& segment, int64_t budget, std::vector<Shadow>* copied) {
  int64_t bytes = 0;
  std::vector<uint8_t> payload;
  std::vector<CatalogPage*> pages;
  for (const auto& [offset, page] : segment.pages) pages.push_back(page);
  for (CatalogPage* page : pages) {
    if (bytes >= budget) break;
    payload.resize(page->payload_bytes);
    PageRecord record;
    const auto status = segment.file->read(page->offset, page->key, page->group,
                                           page->payload_bytes, &record, payload.data());
    if (status != SegmentFile::Status::good) {
      kill(page);
      const std::lock_guard index(index_);
      stats_.damaged += status == SegmentFile::Status::gone ? 0 : 1;
      continue;
    }
    CatalogPage moved;
    {
      const std::lock_guard index(index_);
      moved = *page;
    }
    record.page.keep_value = moved.keep_value;
    record.last_use = moved.last_use;
    if (!place(&record, payload.data(), &moved)) break;
    copied->push_back(
        {page->group, page->segment, page->offset, page->payload_offset, page->payload_bytes});
    bytes += static_cast<int64_t>(page->disk_bytes);
    const std::lock_guard index(index_);
    forget(page);
    moved.unsaved = false;
    enter(segments_.at(moved.segment), std::move(moved));
  }
  return bytes;
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
