// Payloads read from the page cache, through it or with O_DIRECT: always the same bytes, and
// O_DIRECT with the alignment of the strictest file system.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cache/stored_pages.h"
#include "tiers/disk/direct_reader.h"

// Replaces open, pread and mincore of the C library, to fake O_DIRECT and the page cache.
namespace {
struct Disk {
  bool fake = true;        // O_DIRECT works on every file system
  bool opens = true;       // for direct reads
  int cached = 0;          // percent of any range that is in the page cache
  int cache_error = 0;     // of asking for that
  int error = 0;           // of direct reads
  size_t most = SIZE_MAX;  // bytes of a direct read
  bool stale = false;      // direct reads: zeros, as before something was written
  int takes_ms = 0;        // a direct read, at least
  std::atomic<int> direct{-1};
  std::atomic<int> tried{0}, direct_reads{0}, cache_reads{0}, asked{0};
};
std::unique_ptr<Disk> disk = std::make_unique<Disk>();

bool aligned(uint64_t value) {
  return value % turbomind::DirectReader::kBlock == 0;
}
}  // namespace

extern "C" int open(const char* path, int flags, ...) {
  std::va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  const bool direct = (flags & O_DIRECT) != 0;
  if (direct) ++disk->tried;
  if (direct && !disk->opens) {
    errno = EINVAL;
    return -1;
  }
  if (direct && disk->fake) flags &= ~O_DIRECT;
  const int file = static_cast<int>(syscall(SYS_openat, AT_FDCWD, path, flags, mode));
  if (direct) disk->direct = file;
  return file;
}

extern "C" ssize_t pread(int file, void* data, size_t bytes, off_t offset) {
  const bool direct = file == disk->direct;
  ++(direct ? disk->direct_reads : disk->cache_reads);
  if (direct && disk->fake) {
    const auto at = reinterpret_cast<uintptr_t>(data);
    const bool fits = aligned(at) && aligned(bytes) && aligned(static_cast<uint64_t>(offset));
    if (!fits || disk->error != 0) {
      errno = fits ? disk->error : EINVAL;
      return -1;
    }
    bytes = std::min(bytes, disk->most);
    std::this_thread::sleep_for(std::chrono::milliseconds(disk->takes_ms));
  }
  const auto got = static_cast<ssize_t>(syscall(SYS_pread64, file, data, bytes, offset));
  if (direct && disk->stale && got > 0) std::memset(data, 0, static_cast<size_t>(got));
  return got;
}

extern "C" int mincore(void* begin, size_t bytes, unsigned char* there) noexcept {
  ++disk->asked;
  if (!disk->fake) return static_cast<int>(syscall(SYS_mincore, begin, bytes, there));
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t i = 0; i < bytes / page; ++i) there[i] = 2 + (i % 100 < size_t(disk->cached));
  errno = disk->cache_error;
  return disk->cache_error == 0 ? 0 : -1;
}

namespace turbomind {
namespace {

using Use = DirectReader::Use;
constexpr size_t kBlock = DirectReader::kBlock;
constexpr size_t kFileBytes = (3 << 20) + 1234;

// A file of bytes that are all different enough, open.
class File {
 public:
  explicit File(const fs::path& folder) : path_(folder / "payloads-XXXXXX"), bytes_(kFileBytes) {
    file_ = mkstemp(path_.data());
    CHECK(file_ >= 0);
    std::minstd_rand random(3);
    for (uint8_t& byte : bytes_) byte = static_cast<uint8_t>(random() >> 8);
    CHECK(::write(file_, bytes_.data(), bytes_.size()) == static_cast<ssize_t>(bytes_.size()));
  }
  ~File() {
    close(file_);
    unlink(path_.c_str());
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int file() const { return file_; }
  const std::string& path() const { return path_; }
  // Asks the system to drop the file from its cache; if it does not, more reads use the cache.
  void drop() const {
    fdatasync(file_);
    posix_fadvise(file_, 0, 0, POSIX_FADV_DONTNEED);
  }
  bool is(const uint8_t* data, size_t bytes, uint64_t offset) const {
    return std::memcmp(bytes_.data() + offset, data, bytes) == 0;
  }

 private:
  std::string path_;
  Payload bytes_;
  int file_ = -1;
};

class Memory {
 public:
  explicit Memory(size_t bytes) : room_(bytes + 2 * kBlock) {
    const auto at = reinterpret_cast<uintptr_t>(room_.data());
    begin_ = room_.data() + (kBlock - at % kBlock) % kBlock;
  }
  uint8_t* data() const { return begin_; }

 private:
  Payload room_;
  uint8_t* begin_ = nullptr;
};

// Reads all bytes up to the end of the file and writes none after the buffer.
void check_read(DirectReader& reader, const File& file, size_t bytes, uint64_t offset, Use use,
                size_t shift = 0) {
  const Memory memory(bytes + shift + kBlock);
  uint8_t* const data = memory.data() + shift;
  std::memset(data, 0xA5, bytes + kBlock - shift);
  const ssize_t got = reader.read(data, bytes, offset, use);
  const size_t want = offset < kFileBytes ? std::min(bytes, kFileBytes - offset) : 0;
  CHECK(got == static_cast<ssize_t>(want) && file.is(data, want, want > 0 ? offset : 0));
  for (size_t i = bytes; i < bytes + kBlock - shift; ++i) CHECK(data[i] == 0xA5);
}

constexpr size_t kLeast = DirectReader::kLeastDirect;
constexpr size_t kSizes[] = {
    1,       kBlock,         kLeast - 1, kLeast, kLeast + 1, kLeast + 4095, (1 << 20) - 1,
    2 << 20, (2 << 20) + 513};

void check_many(const File& file, bool drops = false) {
  DirectReader reader(file.file(), file.path());
  for (const size_t bytes : kSizes)
    for (const uint64_t offset : {uint64_t{0}, uint64_t{5 * kBlock}, uint64_t{2 << 20},
                                  uint64_t{(3 << 20) - kLeast}, uint64_t{4 << 20}}) {
      if (drops) file.drop();
      check_read(reader, file, bytes, offset, Use::once);
      check_read(reader, file, bytes, offset, Use::often);
    }
  check_read(reader, file, 1 << 20, 0, Use::once, 512);
}

Disk& fresh() {
  disk = std::make_unique<Disk>();
  return *disk;
}

// Any share of the range is cached, and O_DIRECT returns any number of bytes at a time.
void test_bytes() {
  const File file(fs::temp_directory_path());
  for (const int cached : {0, 40, 60, 100})
    for (const size_t most : {SIZE_MAX, 3 * kBlock, size_t{512}}) {
      fresh().cached = cached;
      disk->most = most;
      check_many(file);
      CHECK(disk->asked > 0 && disk->tried == 1 && (disk->direct_reads > 0) == (cached < 50));
    }
}

// A large payload bypasses the cache unless it is cached. Small ones, repeated ones and those for
// unaligned memory use the cache.
void test_ways() {
  const File file(fs::temp_directory_path());
  fresh();
  DirectReader reader(file.file(), file.path());
  check_read(reader, file, (1 << 20) + 5, kBlock, Use::once);
  CHECK(disk->direct_reads == 2 && disk->cache_reads == 0);
  check_read(reader, file, 1 << 20, kBlock, Use::often);
  check_read(reader, file, kLeast - 1, 0, Use::once);
  check_read(reader, file, 1 << 20, 0, Use::once, 16);
  CHECK(disk->direct_reads == 2 && disk->cache_reads == 3);
  disk->cached = 100;
  check_read(reader, file, 1 << 20, 0, Use::once);
  CHECK(disk->direct_reads == 2 && disk->cache_reads == 4);
}

// A system without O_DIRECT, or without mincore(), is asked only once.
void test_refusals() {
  const File file(fs::temp_directory_path());
  for (const int error : {EINVAL, EOPNOTSUPP, ENOMEM})
    for (const char* what : {"open", "read", "cache"}) {
      fresh().opens = std::string(what) != "open";
      if (std::string(what) == "read") disk->error = error;
      if (std::string(what) == "cache") disk->cache_error = error;
      check_many(file);
      CHECK(disk->tried == 1 && disk->asked <= 2 && disk->direct_reads <= 1);
    }
}

void test_errors() {
  const File file(fs::temp_directory_path());
  const Memory memory(1 << 20);
  fresh().error = EIO;
  DirectReader reader(file.file(), file.path());
  for (int i = 1; i < 3; ++i) {
    CHECK(reader.read(memory.data(), 1 << 20, 0, Use::once) == -1 && errno == EIO);
    CHECK(disk->direct_reads == i && disk->cache_reads == 0);
  }
  disk->error = 0;  // it was about that read
  check_read(reader, file, 1 << 20, 0, Use::once);
  CHECK(disk->direct_reads == 3 && disk->cache_reads == 0);
}

// A slow disk is read through the cache, which may save the next read.
void test_slow_disk() {
  const File file(fs::temp_directory_path());
  constexpr size_t kBytes = 1 << 20;
  fresh().takes_ms = static_cast<int>(1000 * kBytes / DirectReader::kLeastSpeed) + 1;
  DirectReader reader(file.file(), file.path());
  constexpr int kReads = DirectReader::kJudged / kBytes;
  for (int i = 0; i < kReads + 2; ++i) check_read(reader, file, kBytes, 0, Use::once);
  CHECK(disk->direct_reads == kReads && disk->cache_reads == 2);
}

// The name refers to another file by now.
void test_another_file() {
  const File file(fs::temp_directory_path());
  const std::string other = file.path() + "-other";
  fresh();
  for (const bool there : {false, true}) {
    if (there) CHECK(fs::copy_file("/proc/self/exe", other));
    DirectReader reader(file.file(), other);
    check_read(reader, file, 1 << 20, 0, Use::once);
    CHECK(disk->direct_reads == 0 && disk->asked == 0);
  }
  unlink(other.c_str());
}

// On the real system: in the folder for temporary files, and in one that is likely on a disk.
void test_system() {
  for (const fs::path& folder : {fs::temp_directory_path(), fs::path("/var/tmp")}) {
    if (access(folder.c_str(), W_OK) != 0) continue;
    const File file(folder);
    fresh().fake = false;
    check_many(file, true);
    check_many(file);
    file.drop();
    DirectReader reader(file.file(), file.path());
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (size_t i = 0; i < 24; ++i)
          check_read(reader, file, kLeast + i, (t + i) * 25 % 64 * kBlock,
                     i % 8 == 0 ? Use::often : Use::once);
      });
    for (std::thread& thread : threads) thread.join();
  }
}

// A tier reads a page for the first time with O_DIRECT; later reads fill the cache.
void test_of_a_tier() {
  const Folder folder;
  const StoredPage page = make_page({}, Tokens(kPageTokens, 7), kLeast + 100);
  fresh();
  auto tier = open(folder);
  CHECK(write(*tier, page));
  const Memory memory(page.payload_bytes);
  const auto read_page = [&] {
    StoredPage found;
    const auto ref = tier->find(page.key, 0);
    const Payload want = payload_of(page);
    return ref && tier->read(*ref, &found, memory.data()) &&
           std::equal(want.begin(), want.end(), memory.data());
  };
  for (int instance = 0; instance < 2; ++instance) {
    CHECK(read_page());
    const int direct = disk->direct_reads;
    CHECK(direct > 0);
    CHECK(read_page() && disk->direct_reads == direct);
    tier.reset();
    fresh();
    tier = open(folder);
  }
  disk->stale = true;
  CHECK(read_page() && disk->direct_reads > 0 && tier->stats().damaged == 0);
  fresh().error = EIO;
  tier = open(folder);
  CHECK(!read_page() && !has(*tier, page));
  fresh();
  tier = open(folder);
  CHECK(read_page() && tier->stats().damaged == 0);  // a page that cannot be read now stays
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(test_bytes),
                                  TM_CASE(test_ways),
                                  TM_CASE(test_refusals),
                                  TM_CASE(test_errors),
                                  TM_CASE(test_slow_disk),
                                  TM_CASE(test_another_file),
                                  TM_CASE(test_system),
                                  TM_CASE(test_of_a_tier),
                              });
}
