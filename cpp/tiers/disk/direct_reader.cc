#include "tiers/disk/direct_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/sysmacros.h>
#endif
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace turbomind {

namespace {

constexpr size_t kReadAhead = 4 << 20, kFarAhead = 1 << 20;
constexpr uint64_t kMapped = 64 << 20;  // bytes mapped at once; addresses only

// Returns whether the system's own readahead is so large that advice for single pages would slow it
// down: advised pages are cached 4 KiB at a time, which takes twice as long as its sequential
// readahead. False when that cannot be found out.
bool reads_far_ahead(int file) {
#ifdef __linux__
  struct stat s;
  if (fstat(file, &s) != 0) return false;
  for (const char* disk : {"", "/.."}) {  // for a partition the file is in its disk's folder
    char path[96];
    std::snprintf(path, sizeof(path), "/sys/dev/block/%u:%u%s/queue/read_ahead_kb", major(s.st_dev),
                  minor(s.st_dev), disk);
    const int setting = open(path, O_RDONLY | O_CLOEXEC);
    if (setting < 0) continue;
    char text[16] = {};
    const ssize_t got = ::read(setting, text, sizeof(text) - 1);
    close(setting);
    return got > 0 && std::strtoull(text, nullptr, 10) * 1024 >= kFarAhead;
  }
#endif
  static_cast<void>(file);
  return false;
}

bool aligned(const uint8_t* data) {
  return reinterpret_cast<uintptr_t>(data) % DirectReader::kBlock == 0;
}

}  // namespace

ssize_t read_some(int file, uint8_t* data, size_t bytes, uint64_t offset) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t n = pread(file, data + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  return static_cast<ssize_t>(done);
}

DirectReader::DirectReader(int file, std::string path)
    : file_(file), path_(std::move(path)), advises_(!reads_far_ahead(file)) {
#ifdef POSIX_FADV_SEQUENTIAL
  if (!advises_) posix_fadvise(file_, 0, 0, POSIX_FADV_SEQUENTIAL);
#endif
}

DirectReader::~DirectReader() {
  if (direct_ >= 0) close(direct_);
  if (map_ != nullptr) munmap(map_, mapped_);
}

// Returns a second descriptor of the file, for O_DIRECT; -1 when that is not supported.
int DirectReader::direct_file() {
#ifdef __linux__
  std::call_once(opened_, [this] {
    direct_ = open(path_.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    struct stat mine, other;
    const bool same = direct_ >= 0 && fstat(file_, &mine) == 0 && fstat(direct_, &other) == 0 &&
                      mine.st_dev == other.st_dev && mine.st_ino == other.st_ino;
    if (!same) refused_ = true;
  });
#else
  refused_ = true;
#endif
  return refused_ ? -1 : direct_;
}

ssize_t DirectReader::read(uint8_t* data, size_t bytes, uint64_t offset, Use use) {
  const bool suits = use == Use::once && bytes >= kLeastDirect && aligned(data);
  const int direct = suits ? direct_file() : -1;
  size_t done = 0;
  if (direct >= 0 && !is_slow() && !is_cached(offset, bytes)) {
    const auto start = std::chrono::steady_clock::now();
    if (!read_direct(direct, data, bytes, offset, &done)) {
      if (errno == EIO) return -1;  // an error of the disk; others may concern O_DIRECT only
      refused_ = true;
    }
    direct_ns_ += (std::chrono::steady_clock::now() - start) / std::chrono::nanoseconds(1);
    direct_bytes_ += static_cast<int64_t>(done);
  }
  if (done == bytes) return static_cast<ssize_t>(done);
  advise(offset + done, bytes - done);
  const ssize_t rest = read_some(file_, data + done, bytes - done, offset + done);
  return rest < 0 ? -1 : static_cast<ssize_t>(done) + rest;
}

bool DirectReader::is_slow() const {
  const int64_t bytes = direct_bytes_;
  return bytes >= kJudged && static_cast<double>(bytes) < kLeastSpeed * 1e-9 * direct_ns_;
}

// Returns whether the cache has at least half of the range; true when that cannot be found out. A
// read with RWF_NOWAIT would also show it, but starts readahead into the cache.
bool DirectReader::is_cached(uint64_t offset, size_t bytes) {
#ifdef __linux__
  static const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const std::lock_guard lock(mapping_);
  const uint64_t end = offset + bytes;
  if (end > mapped_) {
    if (map_ != nullptr) munmap(map_, mapped_);
    mapped_ = (end + kMapped - 1) / kMapped * kMapped;
    void* const map = mmap(nullptr, mapped_, PROT_READ, MAP_SHARED, file_, 0);
    map_ = map == MAP_FAILED ? nullptr : static_cast<uint8_t*>(map);
    if (map_ == nullptr) mapped_ = 0;
  }
  unsigned char there[256];
  uint64_t cached = 0, pages = 0;
  for (uint64_t at = offset / page * page; at < end && map_ != nullptr;) {
    const uint64_t count = std::min<uint64_t>(sizeof(there), (end - at + page - 1) / page);
    if (mincore(map_ + at, count * page, there) != 0) break;
    for (uint64_t i = 0; i < count; ++i) cached += there[i] & 1;
    pages += count;
    at += count * page;
  }
  const bool known = pages * page >= bytes;
  if (!known) refused_ = true;
  return !known || 2 * cached >= pages;
#else
  static_cast<void>(offset), static_cast<void>(bytes);
  return true;
#endif
}

// Reads from `*done` bytes on, which it advances, to the end of the file at most. Whole blocks are
// read in place, the rest through a block of its own. Returns false on an error (errno).
bool DirectReader::read_direct(int direct, uint8_t* data, size_t bytes, uint64_t offset,
                               size_t* done) {
  alignas(kBlock) uint8_t last[kBlock];
  while (*done < bytes) {
    const size_t whole = (bytes - *done) / kBlock * kBlock;
    uint8_t* const to = whole > 0 ? data + *done : last;
    const ssize_t n =
        pread(direct, to, std::max(whole, kBlock), static_cast<off_t>(offset + *done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return false;
    const size_t got = std::min(static_cast<size_t>(n), bytes - *done);
    if (to == last) std::memcpy(data + *done, last, got);
    *done += got;
    if (n == 0 || static_cast<size_t>(n) % kBlock != 0) return true;
  }
  return true;
}

// Requests readahead of the next payloads, so that the pages of a session are read at once.
void DirectReader::advise(uint64_t offset, size_t bytes) {
#ifdef POSIX_FADV_WILLNEED
  if (!advises_) return;
  const uint64_t end = offset + bytes;
  const uint64_t advised = advised_.load(std::memory_order_relaxed);
  const bool forward = offset > read_at_.exchange(offset, std::memory_order_relaxed);
  const bool follows = forward && offset <= advised && end + kReadAhead >= advised;
  if (follows && advised >= end + kReadAhead / 2) return;
  const uint64_t from = follows ? advised : offset;
  posix_fadvise(file_, static_cast<off_t>(from), static_cast<off_t>(end + kReadAhead - from),
                POSIX_FADV_WILLNEED);
  advised_.store(end + kReadAhead, std::memory_order_relaxed);
#else
  static_cast<void>(offset), static_cast<void>(bytes);
#endif
}

}  // namespace turbomind
