#include "tiers/disk/disk_tier.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <unordered_set>

#include "core/error.h"
#include "core/xxh64.h"
#include "tiers/disk/disk_room.h"

namespace turbomind {

namespace {

constexpr int64_t kSegmentBytes = int64_t{256} << 20;
constexpr int64_t kLeastSegmentBytes = int64_t{4} << 20;

constexpr int kEvictionsForOne = 256;         // pages that leave for one, at most
constexpr size_t kMostUnreachable = 1 << 16;  // recorded

uint64_t hash_text(const std::string& text) {
  return xxh64(text.data(), text.size(), 0);
}

int64_t segment_bytes(int64_t quota) {
  return quota == 0 ? kSegmentBytes : std::clamp(quota / 8, kLeastSegmentBytes, kSegmentBytes);
}

void make_folder(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path path(folder);
  if (path.has_parent_path()) fs::create_directories(path.parent_path(), error);
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    throw_error(ErrorCode::invalid_request, "page_folder is '", folder,
                "', which cannot be made: ", std::strerror(errno),
                "; expected a folder that can be written");
  }
  DIR* open = opendir(folder.c_str());
  if (open == nullptr) {
    throw_error(ErrorCode::invalid_request, "page_folder is '", folder,
                "', which cannot be read: ", std::strerror(errno),
                "; expected a folder that can be written");
  }
  closedir(open);
}

}  // namespace

DiskTier::DiskTier(const Options& options)
    : options_(options), numerics_(hash_text(options.numerics)), process_(getpid()) {
  if (options.folder.empty()) {
    throw_error(ErrorCode::invalid_request, "page_folder is '', expected the path of a folder");
  }
  if (options.quota < 0 && options.quota != kAutoQuota) {
    throw_error(ErrorCode::invalid_request, "the disk quota is ", options.quota,
                ", expected bytes of at least 0");
  }
  make_folder(options.folder);
  refresh();
  const bool automatic = options.quota == kAutoQuota;
  const auto room = disk_room(options.folder);
  if (room) least_free_ = least_free(*room, automatic);
  quota_ = automatic ? auto_quota(room.value_or(DiskRoom{}), disk_use()) : options.quota;
  segment_bytes_ = options.segment > 0 ? options.segment : segment_bytes(quota_);
  stats_.quota = quota_;
}

DiskTier::~DiskTier() {
  try {
    const std::lock_guard lock(io_);
    check_process();
    save_uses();
    release_own();
  } catch (const std::exception&) {  // out of memory: the last uses are not saved
  }
}

std::optional<PageRef> DiskTier::find(const BlockHash& key, int group) const {
  const std::lock_guard lock(index_);
  const CatalogPage* page = catalog_.find(key, group);
  return page != nullptr ? std::optional(ref_of(*page)) : std::nullopt;
}

std::optional<PageRef> DiskTier::find_prefix(const BlockHash& parent, int group,
                                             const int32_t* tokens, int count, int* shared) const {
  const std::lock_guard lock(index_);
  const CatalogPage* page = catalog_.find_prefix(parent, group, tokens, count, shared);
  return page != nullptr ? std::optional(ref_of(*page)) : std::nullopt;
}

PageRef DiskTier::ref_of(const CatalogPage& page) const {
  PageRef ref;
  ref.key = page.key;
  ref.parent = page.parent;
  ref.group = page.group;
  ref.count = static_cast<int>(page.tokens.size());
  ref.payload_bytes = page.payload_bytes;
  ref.foreign = page.foreign;
  ref.place[0] = page.segment;
  ref.place[1] = page.offset;
  return ref;
}

bool DiskTier::read(const PageRef& ref, StoredPage* page, uint8_t* payload) {
  if (!read_again(ref, page, payload)) return false;
  const std::lock_guard index(index_);
  ++stats_.reads;
  if (CatalogPage* known = catalog_.find(ref.key, ref.group)) {
    catalog_.set_use(known, known->retention_priority, tick());
    known->was_read = true;
    page->retention_priority = known->retention_priority;
  }
  return true;
}

bool DiskTier::verify(const PageRef& ref) {
  StoredPage page;
  std::vector<uint8_t> payload(ref.payload_bytes);
  return read_again(ref, &page, payload.data());
}

bool DiskTier::read_again(const PageRef& ref, StoredPage* page, uint8_t* payload) {
  bool again = false;
  if (read_once(ref, page, payload, &again)) return true;
  if (!again) return false;
  refresh();  // another process may have moved the page
  return read_once(ref, page, payload, &again);
}

bool DiskTier::read_once(const PageRef& ref, StoredPage* page, uint8_t* payload, bool* again) {
  std::shared_ptr<SegmentFile> file;
  uint64_t offset = 0;
  auto use = DirectReader::Use::once;  // a page read a second time is cached by the system
  {
    const std::lock_guard lock(index_);
    const CatalogPage* known = catalog_.find(ref.key, ref.group);
    if (known == nullptr || known->payload_bytes != ref.payload_bytes ||
        known->foreign != ref.foreign)
      return false;
    file = segments_.at(known->segment).file;
    offset = known->offset;
    if (known->was_read) use = DirectReader::Use::often;
  }
  const bool opens = !file->is_open();
  PageRecord record;
  const auto attempt = [&] {
    return file->read(offset, ref.key, ref.group, ref.payload_bytes, use, &record, payload);
  };
  SegmentFile::Status status = attempt();
  if (status == SegmentFile::Status::failed) {  // such as too many open files
    const std::lock_guard lock(io_);
    close_idle_files(file.get());
    status = attempt();
  } else if (opens) {
    const std::unique_lock lock(io_, std::try_to_lock);  // reads do not wait for maintenance
    if (lock && open_files() > kMaxOpenSegments) close_idle_files(file.get());
  }
  if (status == SegmentFile::Status::good) {
    *page = std::move(record.page);
    return true;
  }
  *again = status == SegmentFile::Status::gone;
  forget_bad(ref, file->id(), offset, status);
  return false;
}

// Forgets a page that read() could not use, unless its place has changed meanwhile.
void DiskTier::forget_bad(const PageRef& ref, uint64_t segment, uint64_t offset,
                          SegmentFile::Status status) {
  const std::lock_guard lock(io_);
  check_process();
  forget_bad_locked(ref, segment, offset, status);
}

void DiskTier::forget_bad_locked(const PageRef& ref, uint64_t segment, uint64_t offset,
                                 SegmentFile::Status status) {
  CatalogPage* known = catalog_.find(ref.key, ref.group);
  if (known == nullptr || known->segment != segment || known->offset != offset) return;
  if (status == SegmentFile::Status::damaged) {
    kill_here(known);
  } else {
    const std::lock_guard index(index_);
    forget(known);
  }
  const std::lock_guard index(index_);
  stats_.damaged += status == SegmentFile::Status::gone ? 0 : 1;
}

CatalogPage DiskTier::describe(const StoredPage& page) const {
  CatalogPage out;
  out.key = page.key;
  out.parent = page.parent;
  out.group = page.group;
  out.tokens = page.tokens;
  out.first_head = page.first_head;
  out.heads = page.heads;
  out.numerics = hash_text(page.numerics);
  out.foreign = out.numerics != numerics_;
  out.payload_bytes = page.payload_bytes;
  out.retention_priority = page.retention_priority;
  return out;
}

// Returns the stored page that makes `page` redundant, the same or a longer one, or null.
CatalogPage* DiskTier::covering(const CatalogPage& page) {
  const auto as_good = [&](const CatalogPage& have) {
    return have.first_head == page.first_head && have.heads == page.heads &&
           (have.numerics == page.numerics || page.foreign);
  };
  CatalogPage* have = catalog_.find(page.key, page.group);
  if (have != nullptr)
    return have->payload_bytes == page.payload_bytes && as_good(*have) ? have : nullptr;
  const int count = static_cast<int>(page.tokens.size());
  int shared = 0;
  have = catalog_.find_prefix(page.parent, page.group, page.tokens.data(), count, &shared);
  return have != nullptr && shared == count && as_good(*have) ? have : nullptr;
}

bool DiskTier::write(const StoredPage& page, const uint8_t* payload) {
  const std::lock_guard lock(io_);
  check_process();
  CatalogPage entry = describe(page);
  CatalogPage* have = nullptr;
  {
    const std::lock_guard index(index_);
    entry.last_use = tick();
    if (!valid_page(page)) {
      ++stats_.write_errors;
      return false;
    }
    have = covering(entry);
  }
  const bool there = have != nullptr && alive(*have);  // reads the disk; the page stays under io_
  if (have != nullptr) {
    const std::lock_guard index(index_);
    if (!there) {  // another process has removed it
      forget(have);
    } else {
      catalog_.set_use(have, std::max(have->retention_priority, page.retention_priority),
                       entry.last_use);
      return true;
    }
  }
  PageRecord record;
  record.page = page;
  record.last_use = entry.last_use;
  entry.disk_bytes = SegmentFile::disk_bytes(page.payload_bytes) + kMaxRecordBytes;
  const auto bytes = static_cast<int64_t>(entry.disk_bytes);
  if (!make_room(entry, excess(bytes))) return false;
  // Of a disk whose free bytes are not for this user, only a write reports that it is full.
  if (!place(&record, payload, &entry) &&
      !(lacks_room(errno) && make_room(entry, bytes) && place(&record, payload, &entry))) {
    const std::lock_guard index(index_);
    ++stats_.write_errors;
    return false;
  }
  wrote_ = true;
  if (CatalogPage* worse = catalog_.find(page.key, page.group)) kill(worse);
  CatalogPage* shorter = catalog_.find_shorter(entry);
  if (shorter != nullptr && (shorter->numerics == entry.numerics || shorter->foreign))
    kill(shorter);
  const std::lock_guard index(index_);
  enter(segments_.at(entry.segment), std::move(entry));
  ++stats_.writes;
  return true;
}

// Returns how many bytes of pages are too many once `added` more are written: above the quota, or
// for want of free bytes.
int64_t DiskTier::excess(int64_t added) const {
  const auto room = disk_room(options_.folder);
  const int64_t taken = room ? least_free_ + added - room->free : 0;
  return quota_ > 0 ? std::max(taken, stats_.bytes + added - quota_) : taken;
}

// Evicts `bytes` of pages, the least valuable first, for `page`. Returns whether it may be written.
bool DiskTier::make_room(const CatalogPage& page, int64_t bytes) {
  if (quota_ > 0 && static_cast<int64_t>(page.disk_bytes) > quota_) return false;
  for (int i = 0; bytes > 0; ++i) {
    CatalogPage* victim = next_victim();
    if (victim == nullptr || i == kEvictionsForOne || unreachable(page, *victim)) return false;
    if (victim->retention_priority >= kPinned && page.retention_priority < kPinned) return false;
    bytes -= static_cast<int64_t>(victim->disk_bytes);
    evict_page(victim);
  }
  return true;
}

// Returns whether evicting `victim` would make `page` unreachable: its parent is `victim`, or a
// page that was itself refused for this reason. Else a sequence larger than the quota would evict
// its own pages.
bool DiskTier::unreachable(const CatalogPage& page, const CatalogPage& victim) {
  const bool refused =
      unreachable_.contains(page.parent) && !catalog_.find(page.parent, page.group);
  if (victim.key != page.parent && !refused) return false;
  if (unreachable_.size() >= kMostUnreachable) unreachable_.clear();
  unreachable_.insert(page.key);
  return true;
}

CatalogPage* DiskTier::next_victim() const {
  const std::lock_guard index(index_);
  return catalog_.least_valuable();
}

// Appends the page and sets its place. A second attempt uses a new segment, with fewer open files.
bool DiskTier::place(PageRecord* record, const uint8_t* payload, CatalogPage* page) {
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto file = writable_segment(page->payload_bytes, attempt > 0);
    size_t bytes = 0;
    if (file && file->append(record, payload, &page->offset, &bytes)) {
      page->segment = file->id();
      page->payload_offset = record->payload_offset;
      page->disk_bytes = SegmentFile::disk_bytes(page->payload_bytes) + bytes;
      return true;
    }
    const int error = errno;
    if (lacks_room(error) || error == EROFS) {
      errno = error;
      return false;
    }
    if (file) release_own();
    close_idle_files(nullptr);
  }
  return false;
}

void DiskTier::touch(const std::vector<BlockHash>& keys, float retention_priority) {
  const std::lock_guard lock(index_);
  const int64_t now = tick();
  for (const BlockHash& key : keys) {
    for (CatalogPage* page : catalog_.find_all(key))
      catalog_.set_use(page, retention_priority, now);
    index_.pass();
  }
}

void DiskTier::remove(const std::vector<BlockHash>& keys) {
  const std::lock_guard lock(io_);
  check_process();
  refresh_locked();  // copies of other processes are removed too
  std::unordered_set<BlockHash> seen(keys.begin(), keys.end());
  std::vector<BlockHash> removed(seen.begin(), seen.end());
  while (!removed.empty()) {
    const BlockHash key = removed.back();
    removed.pop_back();
    for (const CatalogPage* page : catalog_.followers(key))
      if (seen.insert(page->key).second) removed.push_back(page->key);
    for (CatalogPage* page : catalog_.find_all(key)) kill(page);
  }
}

void DiskTier::retain_only(const std::vector<BlockHash>& keys) {
  const std::unordered_set<BlockHash> retained(keys.begin(), keys.end());
  const std::lock_guard lock(io_);
  check_process();
  refresh_locked();
  std::vector<CatalogPage*> leaving;
  catalog_.for_each([&](CatalogPage& page) {
    const bool stays =
        retained.contains(page.key) || (page.partial() && retained.contains(page.parent));
    if (!stays) leaving.push_back(&page);
  });
  for (CatalogPage* page : leaving) kill(page);
}

void DiskTier::refresh() {
  const std::lock_guard lock(io_);
  check_process();
  refresh_locked();
}

void DiskTier::sync() {
  const std::lock_guard lock(io_);
  check_process();
  save_uses();
  // Pages of a segment that could not be synced may not be on the disk.
  if (own_ && !sync_own()) release_own();
}

void DiskTier::maintain() {
  const std::lock_guard lock(io_);
  check_process();
  refresh_locked();
  evict();
  save_uses();
  tidy(compaction_budget());
  if (open_files() > kMaxOpenSegments) close_idle_files(nullptr);
}

TierStats DiskTier::stats() const {
  const std::lock_guard lock(index_);
  TierStats stats = stats_;
  stats.pages = catalog_.size();
  return stats;
}

std::vector<PageRef> DiskTier::pages() const {
  const std::lock_guard lock(index_);
  std::vector<PageRef> out;
  out.reserve(static_cast<size_t>(catalog_.size()));
  for (const auto& [id, segment] : segments_) {
    for (const auto& [offset, page] : segment.pages) out.push_back(ref_of(*page));
  }
  return out;
}

std::vector<int> DiskTier::groups(const BlockHash& key) const {
  const std::lock_guard lock(index_);
  std::vector<int> out;
  for (const CatalogPage* page : catalog_.find_all(key)) out.push_back(page->group);
  std::sort(out.begin(), out.end());
  return out;
}

int64_t DiskTier::bytes_of(const std::vector<BlockHash>& keys) const {
  const std::lock_guard lock(index_);
  int64_t bytes = 0;
  for (const BlockHash& key : keys) {
    for (const CatalogPage* page : catalog_.find_all(key))
      bytes += static_cast<int64_t>(page->disk_bytes);
  }
  return bytes;
}

int64_t DiskTier::segments() const {
  const std::lock_guard lock(index_);
  return static_cast<int64_t>(segments_.size());
}

int64_t DiskTier::passes() const {
  const std::lock_guard lock(index_);
  return index_.passes();
}

int64_t DiskTier::disk_use() const {
  std::vector<std::shared_ptr<SegmentFile>> files;
  {
    const std::lock_guard lock(index_);
    for (const auto& [id, segment] : segments_) files.push_back(segment.file);
  }
  int64_t bytes = 0;
  for (const auto& file : files) bytes += file->disk_use();
  return bytes;
}

// Returns microseconds since 1970, a larger number each time. With index_ held.
int64_t DiskTier::tick() {
  using std::chrono::microseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  clock_ = std::max<int64_t>(clock_ + 1, std::chrono::duration_cast<microseconds>(now).count());
  return clock_;
}

// After a fork the segment belongs to the parent, and locks of open files would be shared.
void DiskTier::check_process() {
  const pid_t process = getpid();
  if (process == process_) return;
  process_ = process;
  own_.reset();
  moved_.clear();
  for (auto& [id, segment] : segments_) segment.file->disinherit();
}

}  // namespace turbomind
