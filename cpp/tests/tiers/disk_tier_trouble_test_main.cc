// Compaction and maintenance of a disk tier on a disk that fails, fills up or changes.
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "tests/cache/stored_pages.h"
#include "tiers/disk/segment_file.h"

// Replaces fsync and pread of the C library, to inject errors.
static std::atomic<bool> syncs_fail{false}, payload_reads_fail{false};
static std::function<void()> before_sync;  // the next one
extern "C" int fdatasync(int fd) {
  if (before_sync) std::exchange(before_sync, nullptr)();
  if (!syncs_fail) return static_cast<int>(syscall(SYS_fdatasync, fd));
  errno = EIO;
  return -1;
}

static bool is_payload(int fd) {
  char name[4096];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = readlink(link.c_str(), name, sizeof(name));
  return length > 3 && std::string(name + length - 3, 3) == ".kv";
}
extern "C" ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  if (!payload_reads_fail || !is_payload(fd))
    return static_cast<ssize_t>(syscall(SYS_pread64, fd, data, bytes, offset));
  errno = EIO;
  return -1;
}

namespace turbomind {
namespace {

// Returns pages that do not follow each other.
std::vector<StoredPage> make_pages(int count, size_t bytes) {
  std::vector<StoredPage> pages;
  for (int i = 0; i < count; ++i)
    pages.push_back(make_page({}, Tokens(kPageTokens, 1000 + i), bytes));
  return pages;
}

// Compaction after most pages were removed moves the rest together and frees the space.
void test_compaction() {
  const Folder folder;
  constexpr int64_t kSegment = 1 << 20;
  const auto chain = make_pages(200, 30000);
  auto tier = open(folder, 0, kSegment);
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  CHECK(tier->segments() >= 6);
  auto other = open(folder, 0, kSegment);
  std::vector<BlockHash> gone;
  for (size_t i = 0; i < chain.size(); ++i) {
    if (i % 10 != 0) gone.push_back(chain[i].key);
  }
  tier->remove(gone);
  for (int i = 0; i < 20; ++i) tier->maintain();
  CHECK(tier->segments() <= 3 && tier->disk_use() < 40 * 32768);
  for (const auto* t : {&tier, &other}) {
    for (size_t i = 0; i < chain.size(); ++i) CHECK(read(**t, chain[i]) == (i % 10 == 0));
  }
  CHECK(other->stats().damaged == 0);  // holes and moved pages do not count as damage
  tier->retain_only({});
  tier->maintain();
  tier->maintain();
  other->refresh();
  CHECK(other->stats().pages == 0 && tier->segments() == 0 && fs::is_empty(folder.pages()));
}

// A page that cannot be read now stays in place and is moved later.
void test_unreadable_payloads() {
  const Folder folder;
  const auto chain = make_chain(3, 40, 30000);
  auto tier = open(folder, 0, 1 << 20);
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  tier.reset();
  tier = open(folder, 0, 1 << 20);
  std::vector<BlockHash> gone;
  for (size_t i = 8; i < chain.size(); ++i) gone.push_back(chain[i].key);
  tier->remove(gone);
  const auto use = tier->disk_use();
  payload_reads_fail = true;
  for (int i = 0; i < 3; ++i) tier->maintain();
  payload_reads_fail = false;
  const auto all_there = [&] {
    for (size_t i = 0; i < 8; ++i)
      if (!read(*tier, chain[i])) return false;
    return true;
  };
  CHECK(tier->stats().pages == 8 && tier->stats().damaged == 0 && all_there());
  for (int i = 0; i < 3; ++i) tier->maintain();
  CHECK(tier->stats().pages == 8 && all_there() && tier->disk_use() <= use);
  const auto again = open(folder);
  CHECK(again->stats().pages == 8);
}

// A page that two instances have written is in two segments. While one record is about to be
// removed as redundant, the other one is removed: its holder may have moved the page.
void test_other_record_leaves() {
  const Folder folder;
  const StoredPage page = make_page({}, Tokens(64, 7));
  auto one = open(folder), two = open(folder);
  CHECK(write(*one, page) && write(*two, page));
  one.reset(), two.reset();
  std::vector<uint64_t> ids;
  for (const auto& file : fs::directory_iterator(folder.pages()))
    if (const uint64_t id = SegmentFile::id_of(file.path().filename())) ids.push_back(id);
  CHECK(ids.size() == 2);
  auto tier = open(folder);
  before_sync = [&] {  // of the lower segment, whose record is the one in use
    SegmentFile lower(folder.pages(), std::min(ids[0], ids[1]));
    SegmentFile::Scan scan;
    CHECK(lower.scan(&scan) == SegmentFile::Status::good && scan.records.size() == 1);
    CHECK(lower.mark_dead(scan.records[0].offset, scan.records[0].bytes));
  };
  tier->maintain();
  CHECK(!before_sync);
  tier->refresh();
  CHECK(read(*tier, page) && read(*open(folder), page));
}

// Pages that could not be synced may be lost in a crash: then the old places still have all pages.
void test_failed_sync() {
  const Folder folder;
  constexpr int64_t kSegment = 1 << 20;
  const auto chain = make_pages(200, 30000);
  auto tier = open(folder, 0, kSegment);
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  tier.reset();
  std::map<fs::path, uintmax_t> old;  // sizes
  for (const auto& file : fs::directory_iterator(folder.pages())) old[file] = file.file_size();
  std::vector<BlockHash> gone;
  for (size_t i = 0; i < chain.size(); ++i) {
    if (i % 10 != 0) gone.push_back(chain[i].key);
  }
  const auto all_there = [&](DiskTier& t) {
    for (size_t i = 0; i < chain.size(); ++i) {
      if (read(t, chain[i]) != (i % 10 == 0)) return false;
    }
    return true;
  };
  tier = open(folder, 0, kSegment);
  tier->remove(gone);
  const StoredPage fresh = make_page({}, Tokens(5, 5));
  for (const bool written_before : {false, true}) {
    syncs_fail = true;
    if (written_before) CHECK(write(*tier, fresh));
    for (int i = 0; i < 5; ++i) tier->maintain();
    tier->sync();
    CHECK(tier->stats().write_errors > 0 && all_there(*tier));
    syncs_fail = false;  // syncs succeed again, but the dropped writes stay lost
    tier->maintain();
    const Folder cut;
    fs::create_directory(cut.pages());
    for (const auto& [file, size] :
         old) {  // the worst case: marks have reached the disk, copies have not
      if (!fs::exists(file)) continue;
      fs::copy(file, cut.pages());
      fs::resize_file(fs::path(cut.pages()) / file.filename(), size);
    }
    CHECK(all_there(*open(cut)));
  }
  CHECK(write(*tier, make_page({}, Tokens(6, 6))));
  tier->sync();  // in a new segment sync succeeds, and compaction continues
  for (int i = 0; i < 20; ++i) tier->maintain();
  CHECK(tier->segments() <= 4 && tier->disk_use() < 50 * 32768);
  CHECK(all_there(*tier) && read(*tier, fresh) && tier->stats().damaged == 0);
}

// Many instances, one after another and at once, leave few files.
void test_few_segments() {
  const Folder folder;
  const auto chain = make_chain(1, 60);
  for (int i = 0; i < 30; ++i) CHECK(write(*open(folder), chain[i]));
  CHECK(open(folder)->segments() == 1);
  std::vector<std::unique_ptr<DiskTier>> tiers;
  for (int i = 30; i < 60; ++i) {
    tiers.push_back(open(folder));
    CHECK(write(*tiers.back(), chain[i]));
  }
  CHECK(open(folder)->segments() == 30);
  tiers.clear();
  auto tier = open(folder);
  tier->maintain();
  CHECK(tier->segments() <= 5);
  for (const StoredPage& page : chain) CHECK(read(*tier, page));
}

// Simulates a full disk by a limit on the size of files, which needs no privileges.
void test_full_disk() {
  const Folder folder;
  const auto chain = make_chain(1, 30);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  getrlimit(RLIMIT_FSIZE, &before);
  auto tier = open(folder);
  CHECK(write(*tier, chain[0]));
  rlimit limit = before;
  limit.rlim_cur = 6000;  // a part of any page fits
  setrlimit(RLIMIT_FSIZE, &limit);
  for (int i = 1; i < 6; ++i) write(*tier, chain[i]);
  const StoredPage large = make_page({}, Tokens(5, 5), 9000);
  CHECK(!write(*tier, large) && !write(*tier, large) && tier->stats().write_errors >= 2);
  limit.rlim_cur = before.rlim_cur;
  setrlimit(RLIMIT_FSIZE, &limit);
  for (int i = 6; i < 12; ++i) CHECK(write(*tier, chain[i]));
  CHECK(read(*tier, chain[0]));
  for (int i = 6; i < 12; ++i) CHECK(read(*tier, chain[i]));
  tier.reset();
  tier = open(folder);
  CHECK(read(*tier, chain[0]) && read(*tier, chain[11]) && tier->stats().damaged == 0);
}

// More segments than file descriptors.
void test_few_files() {
  const Folder folder;
  const auto chain = make_chain(1, 60, 4000);
  auto tier = open(folder, 0, 8192);
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  CHECK(tier->segments() == 30);
  tier.reset();
  rlimit before, limit;
  getrlimit(RLIMIT_NOFILE, &before);
  limit = before;
  limit.rlim_cur = 24;
  setrlimit(RLIMIT_NOFILE, &limit);
  tier = open(folder, 0, 8192);
  for (const StoredPage& page : chain) CHECK(read(*tier, page));
  CHECK(write(*tier, make_page({}, Tokens(5, 5))));
  CHECK(tier->stats().damaged == 0 && tier->stats().write_errors == 0);
  setrlimit(RLIMIT_NOFILE, &before);
}

void test_folder_goes() {
  const Folder folder;
  const auto chain = make_chain(1, 10);
  auto tier = open(folder);
  for (int i = 0; i < 5; ++i) CHECK(write(*tier, chain[i]));
  fs::remove_all(folder.pages());
  CHECK(write(*tier, chain[5]) && read(*tier, chain[5]));  // into a new folder
  tier->refresh();
  for (int i = 0; i < 5; ++i) CHECK(!has(*tier, chain[i]));
  tier->maintain();
  CHECK(open(folder)->stats().pages == 1);
}

// A forked child continues with the parent's instance, but in a segment of its own.
void test_fork() {
  const Folder folder;
  const auto chain = make_chain(1, 40);
  auto tier = open(folder);
  for (int i = 0; i < 5; ++i) CHECK(write(*tier, chain[i]));
  const pid_t child = fork();
  if (child == 0) {
    for (int i = 5; i < 20; ++i) CHECK(write(*tier, chain[i]));
    for (int i = 0; i < 20; ++i) CHECK(read(*tier, chain[i]));
    tier.reset();
    _exit(0);
  }
  for (int i = 20; i < 40; ++i) CHECK(write(*tier, chain[i]));
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  tier->refresh();
  for (const StoredPage& page : chain) CHECK(read(*tier, page));
  CHECK(tier->stats().damaged == 0);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(test_compaction),
                                  TM_CASE(test_unreadable_payloads),
                                  TM_CASE(test_other_record_leaves),
                                  TM_CASE(test_failed_sync),
                                  TM_CASE(test_few_segments),
                                  TM_CASE(test_full_disk),
                                  TM_CASE(test_few_files),
                                  TM_CASE(test_folder_goes),
                                  TM_CASE(test_fork),
                              });
}
