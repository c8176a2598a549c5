// What a disk tier leaves: room on the disk, and nothing of removed pages.
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>

#include "tests/cache/stored_pages.h"
#include "tiers/disk/disk_room.h"
#include "tiers/disk/page_record.h"
#include "tiers/disk/segment_file.h"

// Replaces two functions of the C library: a disk of any size, and one that is suddenly full.
static std::function<int64_t()> free_now;  // bytes
static int64_t total = 0;
static int writes_that_fail = 0;
extern "C" int statvfs(const char*, struct statvfs* out) {
  *out = {};
  out->f_frsize = 1;
  out->f_blocks = static_cast<fsblkcnt_t>(total);
  out->f_bavail = static_cast<fsblkcnt_t>(std::max<int64_t>(0, free_now()));
  return 0;
}
extern "C" ssize_t pwrite(int fd, const void* data, size_t bytes, off_t offset) {
  if (writes_that_fail > 0 && --writes_that_fail >= 0) {
    errno = ENOSPC;
    return -1;
  }
  return static_cast<ssize_t>(syscall(SYS_pwrite64, fd, data, bytes, offset));
}

namespace turbomind {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20, kGiB = int64_t{1} << 30;
constexpr size_t kPage = 1 << 20;  // bytes of the payloads here

// A disk of `size` bytes, of which `others` belong to other files.
void use_disk(const Folder& folder, int64_t size, int64_t others) {
  total = size;
  free_now = [&folder, size, others] {
    int64_t pages = 0;
    if (fs::exists(folder.pages()))
      for (const auto& file : fs::directory_iterator(folder.pages())) {
        struct stat s;
        CHECK(stat(file.path().c_str(), &s) == 0);
        pages += int64_t{s.st_blocks} * 512;
      }
    return size - others - pages;
  };
}

void test_arithmetic() {
  CHECK(auto_quota({100 * kGiB, 50 * kGiB}, 0) == 5 * kGiB);
  CHECK(auto_quota({100 * kGiB, 45 * kGiB}, 5 * kGiB) == 5 * kGiB);  // the same after a restart
  CHECK(auto_quota({10 * kGiB, 2 * kGiB}, 0) == kGiB);
  CHECK(least_free({1000 * kGiB, 0}, true) == 5 * kGiB + 64 * kMiB);
  CHECK(least_free({10 * kGiB, 0}, true) == kGiB / 2 + 64 * kMiB);
  CHECK(least_free({100 * kMiB, 0}, true) == 5 * kMiB + 5 * kMiB / 2);
  CHECK(least_free({1000 * kGiB, 0}, false) == 128 * kMiB - 32 * kMiB);
}

// Pages leave room whatever their quota; when other files grow, pages are removed.
void test_room_is_left() {
  for (const int64_t quota : {kAutoQuota, int64_t{0}, kGiB}) {
    const Folder folder;
    use_disk(folder, 100 * kMiB, 0);
    auto tier = open(folder, quota);
    const auto chain = make_chain(1, 60, kPage), other = make_chain(2, 60, kPage);
    for (const auto* pages : {&chain, &other})
      for (const StoredPage& page : *pages) write(*tier, page);
    CHECK(free_now() >= 5 * kMiB && free_now() < 12 * kMiB);
    CHECK(tier->stats().evicted > 20 && tier->stats().write_errors == 0);
    CHECK(read(*tier, other[59]));
    for (int i = 0; i < 20; ++i) {
      use_disk(folder, 100 * kMiB, i * 5 * kMiB);
      const auto before = tier->stats().pages;
      for (int rounds = 0; rounds < 3; ++rounds) tier->maintain();
      CHECK(tier->stats().pages == before);
      write(*tier, make_page({}, Tokens(kPageTokens, 100 + i), kPage)), tier->maintain();
      CHECK(free_now() >= 5 * kMiB || tier->stats().pages == 0);
      CHECK(tier->stats().pages > 0 || i > 15);
    }
  }
}

// A disk that is full only when it is written to, such as one with a quota of this user.
void test_a_write_that_finds_no_room() {
  const Folder folder;
  use_disk(folder, kGiB, 0);
  auto tier = open(folder);
  const auto chain = make_chain(1, 4, kPage), other = make_chain(2, 2, kPage);
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  writes_that_fail = 1;
  CHECK(write(*tier, other[0]) && tier->stats().evicted == 2 && !has(*tier, chain[2]));
  writes_that_fail = 1 << 20;
  CHECK(!write(*tier, other[1]) && tier->stats().write_errors > 0);
  writes_that_fail = 0;
  CHECK(write(*tier, other[1]) && read(*tier, other[1]));
}

void test_eviction_for_others() {
  const Folder folder;
  use_disk(folder, kGiB, 0);
  auto tier = open(folder);
  const auto low = make_chain(1, 3, kPage), high = make_chain(2, 3, kPage);
  for (const auto* chain : {&high, &low})
    for (const StoredPage& page : *chain) CHECK(write(*tier, page));
  tier->touch(keys_of(low), 0), tier->touch(keys_of(high), 1), tier->sync();
  auto other = open(folder);  // of another process
  CHECK(other->evict_bytes(1, {}) >= 1 << 20 && !has(*other, low[2]) && has(*other, low[1]));
  CHECK(other->evict_bytes(100 << 20, {low[1].key}) >= 3 << 20);
  CHECK(has(*other, low[0]) && has(*other, low[1]) && other->stats().pages == 2);
  CHECK(!read(*tier, high[0]) && read(*tier, low[1]) && tier->stats().damaged == 0);
  CHECK(other->evict_bytes(1 << 30, {}) > 0 && other->evict_bytes(1 << 30, {}) == 0);
  tier->maintain(), other->maintain();
  CHECK(fs::is_empty(folder.pages()));
}

std::string index_of(const Folder& folder) {
  std::string found;
  for (const auto& file : fs::directory_iterator(folder.pages())) {
    if (file.path().extension() != ".idx") continue;
    std::ifstream in(file.path(), std::ios::binary);
    found.append(std::istreambuf_iterator<char>(in), {});
  }
  return found;
}

bool names(const std::string& bytes, const StoredPage& page) {
  const auto* tokens = reinterpret_cast<const char*>(page.tokens.data());
  return bytes.find(std::string(tokens, 4 * page.tokens.size())) != std::string::npos;
}

// The tokens of removed pages are not in the index, those of others are.
void test_removed_pages_are_erased() {
  const Folder folder;
  use_disk(folder, kGiB, 0);
  const auto chain = make_chain(1, 6);
  auto tier = open(folder), other = open(folder);
  const StoredPage apart[2] = {make_page({}, Tokens(9, 7)), make_page({}, Tokens(9, 8))};
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  for (const StoredPage& page : apart) CHECK(write(*tier, page));
  other->remove({chain[4].key});  // takes chain[5] along
  tier->remove({apart[1].key});
  const auto stays = [&](int i) { return i < 4; };
  for (int i = 0; i < 6; ++i) CHECK(names(index_of(folder), chain[i]) == stays(i));
  CHECK(names(index_of(folder), apart[0]) && !names(index_of(folder), apart[1]));
  for (auto* t : {&tier, &other}) {
    (*t)->refresh();
    for (int i = 0; i < 6; ++i) CHECK(read(**t, chain[i]) == stays(i));
    CHECK((*t)->stats().damaged == 0);
  }
  tier.reset();
  const auto again = open(folder);  // continues the segment after the erased record at its end
  CHECK(again->stats().pages == 5 && again->stats().damaged == 0);
  CHECK(write(*again, chain[4]) && read(*again, chain[4]) && read(*again, apart[0]));
}

// Versions before only set the mark, and a process may die after it.
void test_marked_pages_are_erased() {
  const Folder folder;
  use_disk(folder, kGiB, 0);
  const auto chain = make_chain(1, 3);
  auto tier = open(folder);
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  tier.reset();
  for (const auto& file : fs::directory_iterator(folder.pages())) {
    const uint64_t id = SegmentFile::id_of(file.path().filename());
    if (id == 0) continue;
    SegmentFile segment(folder.pages(), id);
    SegmentFile::Scan scan;
    CHECK(segment.scan(&scan) == SegmentFile::Status::good);
    uint8_t mark[kMarkBytes];
    encode_mark(mark);
    std::fstream out(file.path(), std::ios::binary | std::ios::in | std::ios::out);
    out.seekp(static_cast<std::streamoff>(scan.records[1].offset + kMarkOffset));
    out.write(reinterpret_cast<const char*>(mark), kMarkBytes);
  }
  CHECK(names(index_of(folder), chain[1]));
  tier = open(folder);
  for (int i = 0; i < 3; ++i) {
    CHECK(names(index_of(folder), chain[i]) == (i != 1));
    CHECK(read(*tier, chain[i]) == (i != 1));
  }
  CHECK(tier->stats().damaged == 0);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(test_arithmetic),
                                  TM_CASE(test_room_is_left),
                                  TM_CASE(test_a_write_that_finds_no_room),
                                  TM_CASE(test_eviction_for_others),
                                  TM_CASE(test_removed_pages_are_erased),
                                  TM_CASE(test_marked_pages_are_erased),
                              });
}
