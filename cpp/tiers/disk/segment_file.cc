#include "tiers/disk/segment_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <random>

#include "core/xxh64.h"

namespace turbomind {

namespace {

constexpr char kSegmentMagic[8] = {'T', 'M', 'P', 'A', 'G', 'E', 'S', '\n'};
constexpr uint32_t kSegmentVersion = 1;
constexpr size_t kHeaderBytes = 64;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t zero;
  uint64_t id;
  uint64_t zeros[4];
  uint64_t checksum;
};
static_assert(sizeof(Header) == kHeaderBytes);

Header make_header(uint64_t id) {
  Header header{};
  std::memcpy(header.magic, kSegmentMagic, sizeof(kSegmentMagic));
  header.version = kSegmentVersion;
  header.id = id;
  header.checksum = xxh64(&header, kHeaderBytes - 8, 0);
  return header;
}

SegmentFile::Kind kind_of(const Header& header, uint64_t id) {
  if (std::memcmp(header.magic, kSegmentMagic, sizeof(kSegmentMagic)) != 0 || header.id != id ||
      header.checksum != xxh64(&header, kHeaderBytes - 8, 0))
    return SegmentFile::Kind::damaged;
  if (header.version > kSegmentVersion) return SegmentFile::Kind::newer;
  return header.version == kSegmentVersion ? SegmentFile::Kind::ours : SegmentFile::Kind::damaged;
}

bool write_all(int fd, const uint8_t* data, size_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t n = pwrite(fd, data, bytes, static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    data += n, bytes -= static_cast<size_t>(n), offset += static_cast<uint64_t>(n);
  }
  return true;
}

// Truncates the file; on failure the next append overwrites the tail.
void truncate_to(int fd, uint64_t bytes) {
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return;
}

timespec modified(const struct stat& s) {
  return s.st_mtim;
}

bool same_time(const timespec& a, const timespec& b) {
  return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

// A file's time advances in ticks of up to 10 ms: a change within the tick of a scan does not show.
bool within_a_tick(const timespec& modified, const timespec& now) {
  const double age = static_cast<double>(now.tv_sec - modified.tv_sec) +
                     1e-9 * static_cast<double>(now.tv_nsec - modified.tv_nsec);
  return age < 0.05;
}

}  // namespace

SegmentFile::Files::~Files() {
  if (index >= 0) close(index);
  if (payload >= 0) close(payload);
}

SegmentFile::SegmentFile(std::string folder, uint64_t id) : folder_(std::move(folder)), id_(id) {}

std::string SegmentFile::path(const char* suffix) const {
  char name[32];
  std::snprintf(name, sizeof(name), "/%016" PRIx64, id_);
  return folder_ + name + suffix;
}

uint64_t SegmentFile::id_of(const std::string& name) {
  constexpr const char* kDigits = "0123456789abcdef";
  if (name.size() != 20 || name.compare(16, 4, ".idx") != 0) return 0;
  uint64_t id = 0;
  for (int i = 0; i < 16; ++i) {
    const char* digit = std::strchr(kDigits, name[i]);
    if (digit == nullptr || *digit == '\0') return 0;
    id = id * 16 + static_cast<uint64_t>(digit - kDigits);
  }
  return id;
}

bool SegmentFile::write_header(int fd) const {
  const Header header = make_header(id_);
  return write_all(fd, reinterpret_cast<const uint8_t*>(&header), kHeaderBytes, 0);
}

std::shared_ptr<SegmentFile> SegmentFile::create(const std::string& folder) {
  std::random_device random;
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  for (int attempt = 0; attempt < 8; ++attempt) {
    const uint64_t id = (uint64_t{random()} << 32 | random()) | 1;
    auto segment = std::make_shared<SegmentFile>(folder, id);
    const auto files = std::make_shared<Files>();
    files->index = open(segment->path(".idx").c_str(), kFlags, 0600);
    if (files->index < 0 && errno == EEXIST) continue;
    if (files->index < 0) return nullptr;
    files->writable = true;
    segment->files_ = files;
    // Another process may have removed the empty file between these lines; own() detects that.
    if (!segment->lock(*files)) continue;
    files->payload = open(segment->path(".kv").c_str(), kFlags, 0600);
    if (files->payload < 0 || !segment->write_header(files->index)) {
      const int error = errno;
      segment->unlink_files();
      errno = error;
      return nullptr;
    }
    files->reader.emplace(files->payload, segment->path(".kv"));
    segment->index_end_ = kHeaderBytes;
    segment->named_ = false;
    if (fstat(files->index, &segment->seen_) != 0) continue;
    return segment;
  }
  return nullptr;
}

std::shared_ptr<SegmentFile::Files> SegmentFile::open_files(int* error) const {
  constexpr int kFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;  // whatever the name refers to
  auto files = std::make_shared<Files>();
  for (const int mode : {O_RDWR, O_RDONLY}) {
    files->index = open(path(".idx").c_str(), mode | kFlags);
    files->writable = mode == O_RDWR;
    if (files->index >= 0 || (errno != EACCES && errno != EROFS && errno != EPERM)) break;
  }
  if (files->index >= 0) {
    files->payload = open(path(".kv").c_str(), (files->writable ? O_RDWR : O_RDONLY) | kFlags);
  }
  if (files->index < 0 || (files->payload < 0 && errno != ENOENT)) {
    *error = errno;
    return nullptr;
  }
  if (files->payload >= 0) files->reader.emplace(files->payload, path(".kv"));
  return files;  // without payloads the index can still be removed
}

std::shared_ptr<SegmentFile::Files> SegmentFile::files(int* error) {
  const std::lock_guard lock(mutex_);
  int unused = 0;
  // The payload file may not have existed yet.
  const bool again = !files_ || (files_->payload < 0 && !owned_);
  if (again) files_ = open_files(error != nullptr ? error : &unused);
  return files_;
}

void SegmentFile::close_files() {
  const std::lock_guard lock(mutex_);
  if (!owned_) files_.reset();
}

bool SegmentFile::is_open() const {
  const std::lock_guard lock(mutex_);
  return files_ != nullptr;
}

SegmentFile::Status SegmentFile::changed() const {
  struct stat now;
  if (stat(path(".idx").c_str(), &now) != 0) {
    return errno == ENOENT || errno == ENOTDIR ? Status::gone : Status::failed;
  }
  if (now.st_ino != seen_.st_ino || now.st_dev != seen_.st_dev) return Status::gone;
  const bool same =
      !unsure_ && now.st_size == seen_.st_size && same_time(modified(now), modified(seen_));
  return same ? Status::good : Status::damaged;
}

SegmentFile::Status SegmentFile::scan(Scan* scan) {
  int error = 0;
  const auto open = files(&error);
  if (!open) return error == ENOENT || error == ENOTDIR ? Status::gone : Status::failed;
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (fstat(open->index, &seen_) != 0) return Status::failed;
  unsure_ = within_a_tick(modified(seen_), now);
  const auto size = static_cast<uint64_t>(std::max<int64_t>(0, seen_.st_size));
  std::vector<uint8_t> data(std::min(size, kMaxIndexBytes + kMaxRecordBytes));
  const ssize_t got = read_some(open->index, data.data(), data.size(), 0);
  if (got < 0) return Status::failed;
  data.resize(static_cast<size_t>(got));
  // After the records: their payloads were written before them, but maybe after `open` was opened.
  const auto payloads = open->payload >= 0 ? open : files(&error);
  if (!payloads) return Status::failed;
  struct stat payload = {};
  if (payloads->payload >= 0 && fstat(payloads->payload, &payload) != 0) return Status::failed;

  Header header{};
  std::memcpy(&header, data.data(), std::min(data.size(), kHeaderBytes));
  kind_ = data.empty() ? Kind::unfinished : kind_of(header, id_);
  index_end_ = kHeaderBytes;
  payload_end_ = 0;
  torn_.clear();
  if (kind_ != Kind::ours) return Status::damaged;

  bool in_gap = false;
  for (uint64_t at = kHeaderBytes; at < data.size();) {
    Found found;
    found.offset = at;
    found.bytes = decode_record(data.data() + at, data.size() - at, id_, at, &found.record);
    if (found.bytes == 0) {
      in_gap = true;
      at += 8;
      continue;
    }
    if (in_gap) ++scan->damaged;
    in_gap = false;
    at += found.bytes;
    index_end_ = at;
    const PageRecord& record = found.record;
    // An older version has only set the mark, or a process has died after it.
    if (record.dead && !is_erased(data.data() + found.offset, found.bytes))
      mark_dead(found.offset, found.bytes);
    const uint64_t room = static_cast<uint64_t>(payload.st_size);
    const bool whole = record.payload_offset % kAlignment == 0 && record.payload_offset <= room &&
                       record.page.payload_bytes <= room - record.payload_offset;
    if (whole) {
      payload_end_ =
          std::max(payload_end_, record.payload_offset + disk_bytes(record.page.payload_bytes));
      scan->records.push_back(std::move(found));
    } else if (!record.dead) {
      ++scan->damaged;
      torn_.emplace_back(found.offset, found.bytes);
    }
  }
  return Status::good;
}

bool SegmentFile::own() {
  if (owned_) return true;
  const auto open = files();
  if (!open || !open->writable || !lock(*open)) return false;
  // The creator may have created and filled the payloads and ended between our open and lock.
  struct stat s;
  if (open->payload >= 0 || lstat(path(".kv").c_str(), &s) != 0) return true;
  disown();  // they are opened the next time
  return false;
}

bool SegmentFile::lock(const Files& open) {
  if (flock(open.index, LOCK_EX | LOCK_NB) != 0) return false;
  struct stat now;
  if (fstat(open.index, &now) != 0 || now.st_nlink == 0) {
    flock(open.index, LOCK_UN);
    return false;
  }
  owned_ = true;
  return true;
}

void SegmentFile::cut_tail() {
  const auto open = files();
  if (!owned_ || !open) return;
  // Their places are reused: left alive they would refer to payloads of other pages.
  for (const auto& [offset, bytes] : torn_)
    if (!mark_dead(offset, bytes)) return;
  torn_.clear();
  struct stat s;
  if (fstat(open->index, &s) == 0 && static_cast<uint64_t>(s.st_size) > index_end_)
    truncate_to(open->index, index_end_);
  if (open->payload >= 0 && fstat(open->payload, &s) == 0 &&
      static_cast<uint64_t>(s.st_size) > payload_end_)
    truncate_to(open->payload, payload_end_);
}

void SegmentFile::disown() {
  if (!owned_) return;
  if (const auto open = files()) flock(open->index, LOCK_UN);
  owned_ = false;
}

void SegmentFile::disinherit() {
  owned_ = false;
  close_files();
}

bool SegmentFile::append(PageRecord* record, const uint8_t* payload, uint64_t* offset,
                         size_t* bytes) {
  const auto open = files();
  if (!owned_ || !open || open->payload < 0) {
    errno = EBADF;
    return false;
  }
  const size_t payload_bytes = record->page.payload_bytes;
  record->payload_offset = payload_end_;
  record->payload_checksum = payload_checksum(record->page, payload);
  record->dead = false;
  const std::vector<uint8_t> data = encode_record(*record, id_, index_end_);
  if (!write_all(open->payload, payload, payload_bytes, payload_end_) ||
      !write_all(open->index, data.data(), data.size(), index_end_)) {
    const int error = errno;
    truncate_to(open->index, index_end_);
    truncate_to(open->payload, payload_end_);
    errno = error;
    return false;
  }
  *offset = index_end_;
  *bytes = data.size();
  index_end_ += data.size();
  payload_end_ += disk_bytes(payload_bytes);
  return true;
}

// Syncs the folder's entries of new files.
bool SegmentFile::sync_name() {
  if (named_) return true;
  const int folder = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  named_ = folder >= 0 && fsync(folder) == 0;
  if (folder >= 0) close(folder);
  return named_;
}

bool SegmentFile::sync() {
  const auto open = files();
  if (sync_failed_ || !open || open->payload < 0 || !sync_name()) return false;
  sync_failed_ = fdatasync(open->payload) != 0 || fdatasync(open->index) != 0;
  return !sync_failed_;
}

void SegmentFile::unlink_files() {
  if (!owned_) return;
  // The index first: payloads without an index are removed by any process.
  unlink(path(".idx").c_str());
  unlink(path(".kv").c_str());
  disown();
}

SegmentFile::Status SegmentFile::read(uint64_t offset, const BlockHash& key, int group,
                                      size_t payload_bytes, DirectReader::Use use,
                                      PageRecord* record, uint8_t* payload) {
  int error = 0;
  const auto open = files(&error);
  if (!open) return error == ENOENT || error == ENOTDIR ? Status::gone : Status::failed;
  if (open->payload < 0) return Status::gone;
  uint8_t data[kMaxRecordBytes];
  const ssize_t head = read_some(open->index, data, sizeof(data), offset);
  if (head < 0) return Status::failed;
  if (decode_record(data, static_cast<size_t>(head), id_, offset, record) == 0)
    return marked_dead(data, static_cast<size_t>(head)) ? Status::gone : Status::damaged;
  if (record->dead) return Status::gone;
  const StoredPage& page = record->page;
  if (!(page.key == key) || page.group != group || page.payload_bytes != payload_bytes)
    return Status::damaged;
  // Covers file systems where O_DIRECT does not see what was just written.
  for (const auto way : {use, DirectReader::Use::often}) {
    const ssize_t got = open->reader->read(payload, payload_bytes, record->payload_offset, way);
    if (got < 0) return Status::failed;
    if (static_cast<size_t>(got) == payload_bytes &&
        payload_checksum(page, payload) == record->payload_checksum)
      return Status::good;
    if (way == DirectReader::Use::often) break;
  }
  // Another process may have removed the page since its record was read.
  const ssize_t again = read_some(open->index, data, sizeof(data), offset);
  if (again > 0 && decode_record(data, static_cast<size_t>(again), id_, offset, record) > 0 &&
      record->dead)
    return Status::gone;
  return Status::damaged;
}

bool SegmentFile::alive(uint64_t offset, const BlockHash& key, int group) {
  const auto open = files();
  uint8_t data[kMaxRecordBytes];
  const ssize_t head = open ? read_some(open->index, data, sizeof(data), offset) : -1;
  PageRecord record;
  return head > 0 && decode_record(data, static_cast<size_t>(head), id_, offset, &record) > 0 &&
         !record.dead && record.page.key == key && record.page.group == group;
}

// The mark first: whoever reads the record while the rest is overwritten sees that it is dead.
bool SegmentFile::mark_dead(uint64_t offset, size_t bytes) {
  const auto open = files();
  uint8_t data[kMaxRecordBytes] = {};
  encode_mark(data);
  if (!open || !open->writable || !write_all(open->index, data, kMarkBytes, offset + kMarkOffset))
    return false;
  bytes = std::min(bytes, kMaxRecordBytes);
  const ssize_t got = read_some(open->index, data, bytes, offset);
  if (got < static_cast<ssize_t>(kMinRecordBytes)) return got >= 0;
  erase_record(data, static_cast<size_t>(got));
  return write_all(open->index, data, static_cast<size_t>(got), offset);
}

bool SegmentFile::save_use(uint64_t offset, float retention_priority, int64_t last_use,
                           const BlockHash& key) {
  const auto open = files();
  uint8_t use[kUseBytes];
  encode_use(use, retention_priority, last_use, key);
  return open && open->writable && write_all(open->index, use, kUseBytes, offset + kUseOffset);
}

bool SegmentFile::punch(uint64_t offset, size_t bytes) {
#ifdef FALLOC_FL_PUNCH_HOLE
  const auto open = files();
  return open && open->writable && open->payload >= 0 &&
         fallocate(open->payload, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                   static_cast<off_t>(offset), static_cast<off_t>(disk_bytes(bytes))) == 0;
#else
  static_cast<void>(offset), static_cast<void>(bytes);
  return false;
#endif
}

int64_t SegmentFile::disk_use() const {
  int64_t bytes = 0;
  for (const char* suffix : {".idx", ".kv"}) {
    struct stat s;
    if (stat(path(suffix).c_str(), &s) == 0) bytes += int64_t{s.st_blocks} * 512;
  }
  return bytes;
}

}  // namespace turbomind
