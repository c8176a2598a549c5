// The disk tier against plain maps: what it gives is exactly what was written, or nothing.
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "cache/disk_tier.h"
#include "cache/kv_layout.h"
#include "core/error.h"
#include "core/xxh64.h"

// The disk's answers to a sync and to a read of payloads, in place of the C library's.
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

namespace fs = std::filesystem;
using Tokens = std::vector<int32_t>;
using Payload = std::vector<uint8_t>;

#define CHECK(cond)                                                  \
  do {                                                               \
    if (!(cond)) {                                                   \
      std::printf("%s:%d: failed: %s\n", __FILE__, __LINE__, #cond); \
      std::exit(1);                                                  \
    }                                                                \
  } while (0)

class Folder {
 public:
  Folder() {
    std::string name = fs::temp_directory_path() / "pages-XXXXXX";
    CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { fs::remove_all(path_); }
  std::string pages() const { return path_ + "/pages"; }

 private:
  std::string path_;
};

constexpr const char* kOwn = "cpu/test/1";

std::unique_ptr<DiskTier> open(const Folder& folder, int64_t quota = 0, int64_t segment = 0,
                               const char* numerics = kOwn) {
  DiskTier::Options options;
  options.folder = folder.pages();
  options.quota = quota;
  options.numerics = numerics;
  options.segment = segment;
  return std::make_unique<DiskTier>(options);
}

StoredPage make_page(const ChainKey& parent, const Tokens& tokens, size_t bytes = 5000,
                     int group = 0) {
  StoredPage page;
  page.parent = parent;
  page.tokens = tokens;
  page.key = next_key(parent, tokens.data(), static_cast<int>(tokens.size()));
  page.group = group;
  page.fingerprint = "a model";
  page.numerics = kOwn;
  page.heads = 2;
  page.payload_bytes = bytes;
  return page;
}

// Bytes that follow from the page and from nothing else.
Payload payload_of(const StoredPage& page) {
  Payload out(page.payload_bytes);
  std::minstd_rand random(static_cast<uint32_t>(page.key.lo + page.group));
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(random());
  return out;
}

bool write(DiskTier& tier, const StoredPage& page) {
  return tier.write(page, payload_of(page).data());
}

bool has(const DiskTier& tier, const StoredPage& page) {
  return tier.find(page.key, page.group).has_value();
}

// Reads the page and compares all of it. False when it is not there.
bool read(DiskTier& tier, const StoredPage& want) {
  const auto ref = tier.find(want.key, want.group);
  if (!ref) return false;
  StoredPage page;
  Payload payload(ref->payload_bytes);
  if (!tier.read(*ref, &page, payload.data())) {
    CHECK(!has(tier, want));
    return false;
  }
  CHECK(page.key == want.key && page.parent == want.parent && page.group == want.group);
  CHECK(page.tokens == want.tokens && page.fingerprint == want.fingerprint);
  CHECK(page.heads == want.heads && page.first_head == want.first_head);
  CHECK(page.payload_bytes == want.payload_bytes && payload == payload_of(want));
  return true;
}

std::vector<StoredPage> make_chain(int salt, int pages, size_t bytes = 5000) {
  std::vector<StoredPage> chain;
  ChainKey parent = root_key("a model", 0, std::to_string(salt));
  for (int i = 0; i < pages; ++i) {
    chain.push_back(make_page(parent, Tokens(kPageTokens, i + 1), bytes));
    parent = chain.back().key;
  }
  return chain;
}

std::vector<ChainKey> keys_of(const std::vector<StoredPage>& pages) {
  std::vector<ChainKey> keys;
  for (const StoredPage& page : pages) keys.push_back(page.key);
  return keys;
}

// The specification's empty text, and values of its reference program.
void test_checksum() {
  const auto hash = [](const std::string& s) { return xxh64(s.data(), s.size(), 0); };
  CHECK(hash("") == 0xef46db3751d8e999u);
  CHECK(hash("a") == 0xd24ec4f1a98c6e5bu);
  CHECK(hash("abc") == 0x44bc2cf5ad770999u);
  CHECK(hash("Nobody inspects the spammish repetition") == 0xfbcea83c8a378bf1u);
}

void test_round_trip() {
  const Folder folder;
  const ChainKey root = root_key("a model", 0, "");
  std::vector<StoredPage> pages;
  for (int i = 0; i < 40; ++i) {
    const Tokens tokens(1 + i % kPageTokens, 100 + i);
    pages.push_back(make_page(root, tokens, 1 + 977 * i, i % 3));
  }
  {
    auto tier = open(folder);
    for (const StoredPage& page : pages) CHECK(!has(*tier, page) && write(*tier, page));
    for (const StoredPage& page : pages) CHECK(read(*tier, page));
    tier->sync();
  }
  struct stat s;
  CHECK(stat(folder.pages().c_str(), &s) == 0 && (s.st_mode & 0777) == 0700);
  for (const auto& file : fs::directory_iterator(folder.pages()))
    CHECK(stat(file.path().c_str(), &s) == 0 && (s.st_mode & 0777) == 0600);
  auto tier = open(folder);
  CHECK(tier->stats().pages == 40 && tier->stats().damaged == 0 && tier->segments() == 1);
  for (const StoredPage& page : pages) CHECK(read(*tier, page));
  CHECK(write(*tier, pages[0]) && tier->stats().writes == 0);
  tier->remove(keys_of(pages));
  CHECK(tier->stats().pages == 0 && tier->stats().bytes == 0);
  tier.reset();
  CHECK(open(folder)->stats().pages == 0);
}

void test_bad_arguments() {
  const Folder folder;
  auto tier = open(folder);
  StoredPage page = make_page({}, Tokens(3, 1));
  page.tokens[1] = 2;  // no longer its key
  CHECK(!write(*tier, page) && tier->stats().write_errors == 1);
  CHECK(!write(*tier, make_page({}, Tokens(65, 1))));
  for (const char* name : {"", "/dev/null/pages", "/proc/none/pages"}) {
    DiskTier::Options options;
    options.folder = name;
    try {
      DiskTier other(options);
      CHECK(!"a folder that cannot be");
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::invalid_request);
      CHECK(std::string(e.what()).find("page_folder") != std::string::npos);
    }
  }
}

int naive_shared(const Tokens& a, const Tokens& b) {
  size_t n = 0;
  while (n < a.size() && n < b.size() && a[n] == b[n]) ++n;
  return static_cast<int>(n);
}

void test_beginnings() {
  const Folder folder;
  auto tier = open(folder);
  std::mt19937 random(7);
  const auto draw = [&](int limit) {
    Tokens tokens(1 + random() % limit);
    for (int32_t& t : tokens) t = static_cast<int32_t>(random() % 3);
    return tokens;
  };
  const ChainKey parents[] = {root_key("a", 0, ""), root_key("b", 0, "")};
  std::vector<StoredPage> pages;
  for (int i = 0; i < 300; ++i) {
    pages.push_back(make_page(parents[i % 2], draw(i % 5 ? 12 : kPageTokens), 64, i / 2 % 2));
    CHECK(write(*tier, pages.back()));
  }
  for (int i = 0; i < 500; ++i) {
    const Tokens tokens = draw(kPageTokens);
    const int group = i / 2 % 2;
    int want = 0, got = -1;
    for (const StoredPage& page : pages) {
      if (page.parent == parents[i % 2] && page.group == group)
        want = std::max(want, naive_shared(page.tokens, tokens));
    }
    const auto ref = tier->find_beginning(parents[i % 2], group, tokens.data(),
                                          static_cast<int>(tokens.size()), &got);
    CHECK(got == want && ref.has_value() == (want > 0));
    if (!ref) continue;
    StoredPage page;
    Payload payload(ref->payload_bytes);
    CHECK(tier->read(*ref, &page, payload.data()) && payload == payload_of(page));
    CHECK(naive_shared(page.tokens, tokens) == want && ref->count == int(page.tokens.size()));
  }
}

void test_partial_pages() {
  const Folder folder;
  auto tier = open(folder);
  const ChainKey root = root_key("a model", 0, "");
  Tokens tokens(kPageTokens, 5);
  const StoredPage full = make_page(root, tokens);
  const StoredPage ten = make_page(root, Tokens(10, 5)), twenty = make_page(root, Tokens(20, 5));
  CHECK(write(*tier, ten) && write(*tier, twenty));
  CHECK(!has(*tier, ten) && read(*tier, twenty));  // gave way to the longer one
  CHECK(write(*tier, ten) && !has(*tier, ten));    // which is as good
  CHECK(write(*tier, full) && !has(*tier, twenty));
  const StoredPage behind = make_page(full.key, Tokens(3, 1));
  const StoredPage next = make_page(full.key, Tokens(kPageTokens, 2));
  CHECK(write(*tier, behind) && write(*tier, next));
  tier->remove({full.key});
  CHECK(!has(*tier, full) && !has(*tier, behind) && has(*tier, next));
  CHECK(write(*tier, full) && write(*tier, behind) && write(*tier, ten));
  tier->keep_only({full.key});
  CHECK(has(*tier, full) && has(*tier, behind) && !has(*tier, next));
}

void test_numerics() {
  const Folder folder;
  StoredPage page = make_page({1, 2}, Tokens(kPageTokens, 5));
  auto tier = open(folder);
  page.numerics = "cpu/other/1";
  CHECK(write(*tier, page) && tier->find(page.key, 0)->foreign);
  page.numerics = kOwn;
  CHECK(write(*tier, page) && !tier->find(page.key, 0)->foreign);
  page.numerics = "cpu/other/1";
  CHECK(write(*tier, page) && !tier->find(page.key, 0)->foreign);
  CHECK(tier->stats().pages == 1 && tier->stats().writes == 2);
  CHECK(open(folder, 0, 0, "cpu/other/1")->find(page.key, 0)->foreign);
}

void test_quota() {
  const Folder folder;
  constexpr int64_t kPages = 10;
  const auto pinned = make_chain(1, 3), old = make_chain(2, 4), used = make_chain(3, 3);
  const int64_t quota = kPages * (8192 + 600);
  {
    auto tier = open(folder, quota);
    for (const auto* chain : {&pinned, &old, &used})
      for (const StoredPage& page : *chain) CHECK(write(*tier, page));
    CHECK(tier->stats().evicted == 0);
    tier->touch(keys_of(pinned), DiskTier::kPinned);
    tier->touch(keys_of(old), 1);
    tier->touch(keys_of(used), 1);
  }
  auto tier = open(folder, quota);  // values and uses survive an orderly end
  auto fresh = make_chain(4, 9);
  for (StoredPage& p : fresh) p.keep_value = 1;
  // The end of the chain that was used longest ago goes first: beginnings are of use alone.
  CHECK(write(*tier, fresh[0]) && !has(*tier, old[3]) && has(*tier, old[0]));
  for (int i = 1; i < 4; ++i) CHECK(write(*tier, fresh[i]));
  CHECK(!has(*tier, old[0]) && has(*tier, used[2]) && tier->stats().evicted == 4);
  for (int i = 4; i < 7; ++i) CHECK(write(*tier, fresh[i]));
  CHECK(!has(*tier, used[0]));
  CHECK(!write(*tier, fresh[7]));  // only its own past and pinned pages are left
  for (const StoredPage& page : pinned) CHECK(read(*tier, page));
  for (int i = 0; i < 7; ++i) CHECK(read(*tier, fresh[i]));
  CHECK(tier->stats().bytes <= quota && tier->stats().write_errors == 0);
  CHECK(!write(*tier, make_page({}, Tokens(1, 1), static_cast<size_t>(quota))));
  // When all are pinned, pinned ones go.
  tier->touch(keys_of(fresh), DiskTier::kPinned);
  StoredPage page = make_page({}, Tokens(kPageTokens, 9));
  CHECK(!write(*tier, page));
  page.keep_value = DiskTier::kPinned;
  CHECK(write(*tier, page) && !has(*tier, pinned[2]));
  tier.reset();
  tier = open(folder, quota / 3);
  while (tier->stats().bytes > quota / 3) tier->maintain();
  CHECK(tier->stats().pages == 3 && has(*tier, page));
}

// Most pages go; what is left moves together, and the space comes back.
void test_compaction() {
  const Folder folder;
  constexpr int64_t kSegment = 1 << 20;
  const auto chain = make_chain(1, 200, 30000);
  auto tier = open(folder, 0, kSegment);
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  CHECK(tier->segments() >= 6);
  auto other = open(folder, 0, kSegment);
  std::vector<ChainKey> gone;
  for (size_t i = 0; i < chain.size(); ++i) {
    if (i % 10 != 0) gone.push_back(chain[i].key);
  }
  tier->remove(gone);
  for (int i = 0; i < 20; ++i) tier->maintain();
  CHECK(tier->segments() <= 3 && tier->disk_use() < 40 * 32768);
  for (const auto* t : {&tier, &other}) {
    for (size_t i = 0; i < chain.size(); ++i) CHECK(read(**t, chain[i]) == (i % 10 == 0));
  }
  CHECK(other->stats().damaged == 0);  // holes and moved pages are none
  tier->keep_only({});
  tier->maintain();
  tier->maintain();
  other->refresh();
  CHECK(other->stats().pages == 0 && tier->segments() == 0 && fs::is_empty(folder.pages()));
}

// What cannot be read now stays where it is, and moves when it can.
void test_unreadable_payloads() {
  const Folder folder;
  const auto chain = make_chain(3, 40, 30000);
  auto tier = open(folder, 0, 1 << 20);
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  tier.reset();
  tier = open(folder, 0, 1 << 20);
  std::vector<ChainKey> gone;
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

// A page that two instances have written is in two segments. While the one record is about to be
// taken for needless the other leaves: its holder has moved the page, say.
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
  before_sync = [&] {  // of the lower one, which is the one that counts
    SegmentFile lower(folder.pages(), std::min(ids[0], ids[1]));
    SegmentFile::Scan scan;
    CHECK(lower.scan(&scan) == SegmentFile::Status::good && scan.records.size() == 1);
    CHECK(lower.mark_dead(scan.records[0].offset));
  };
  tier->maintain();
  CHECK(!before_sync);
  tier->refresh();
  CHECK(read(*tier, page) && read(*open(folder), page));
}

// What could not be synced may be lost with the machine: then the old places still have all pages.
void test_failed_sync() {
  const Folder folder;
  constexpr int64_t kSegment = 1 << 20;
  const auto chain = make_chain(1, 200, 30000);
  auto tier = open(folder, 0, kSegment);
  for (const StoredPage& page : chain) CHECK(write(*tier, page));
  tier.reset();
  std::map<fs::path, uintmax_t> old;  // sizes
  for (const auto& file : fs::directory_iterator(folder.pages())) old[file] = file.file_size();
  std::vector<ChainKey> gone;
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
    syncs_fail = false;  // from now on the system says yes, and what it forgot stays forgotten
    tier->maintain();
    const Folder cut;
    fs::create_directory(cut.pages());
    for (const auto& [file, size] : old) {  // the worst: marks have reached the disk, copies not
      if (!fs::exists(file)) continue;
      fs::copy(file, cut.pages());
      fs::resize_file(fs::path(cut.pages()) / file.filename(), size);
    }
    CHECK(all_there(*open(cut)));
  }
  CHECK(write(*tier, make_page({}, Tokens(6, 6))));
  tier->sync();  // in a new segment this one is fine, and compaction goes on
  for (int i = 0; i < 20; ++i) tier->maintain();
  CHECK(tier->segments() <= 4 && tier->disk_use() < 50 * 32768);
  CHECK(all_there(*tier) && read(*tier, fresh) && tier->stats().damaged == 0);
}

// Many instances, one after the other and at once, do not leave many files.
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

// Instances that write, remove, compact and refresh in turn, against the set of what may be there.
void test_instances() {
  const Folder folder;
  std::mt19937 random(11);
  std::vector<StoredPage> pages;
  for (int salt = 0; salt < 6; ++salt) {
    for (const StoredPage& page : make_chain(salt, 8, 3000 + 2000 * salt)) pages.push_back(page);
  }
  std::vector<std::unique_ptr<DiskTier>> tiers(3);
  for (auto& tier : tiers) tier = open(folder, 0, 1 << 17);
  std::map<uint64_t, bool> written;  // by key.lo; false: removed by somebody
  for (int i = 0; i < 2000; ++i) {
    auto& tier = tiers[random() % tiers.size()];
    const StoredPage& page = pages[random() % pages.size()];
    switch (random() % 10) {
      case 0:
        tier->remove({page.key});
        written[page.key.lo] = false;
        break;
      case 1:
        tier->refresh();
        break;
      case 2:
        if (random() % 4 == 0) tier->maintain();
        break;
      case 3:
        if (random() % 10 == 0) {
          tier.reset();
          tier = open(folder, 0, 1 << 17);
        }
        break;
      case 4:
      case 5:
        tier->refresh();
        CHECK(write(*tier, page));
        written[page.key.lo] = true;
        break;
      default:
        if (random() % 2) tier->refresh();
        read(*tier, page);
    }
  }
  for (auto& tier : tiers) {
    tier->refresh();
    for (const StoredPage& page : pages) CHECK(read(*tier, page) == written[page.key.lo]);
    CHECK(tier->stats().damaged == 0 && tier->stats().write_errors == 0);
  }
}

void test_threads() {
  const Folder folder;
  auto tier = open(folder, 400 * 8192, 1 << 18);
  std::atomic<bool> failed = false;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto chain = make_chain(t / 2, 40);
      for (int i = 0; i < 200; ++i) {
        const StoredPage& page = chain[(i * 7 + t) % chain.size()];
        failed = failed || !write(*tier, page);
        read(*tier, page);
        int shared = 0;
        tier->find_beginning(page.parent, 0, page.tokens.data(), 5, &shared);
        tier->touch(keys_of(chain), static_cast<float>(i % 3));
        if (i % 16 == 0) tier->remove({page.key});
        if (i % 64 == 1) tier->maintain();
        if (i % 16 == 2) tier->refresh();
        tier->stats();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(!failed && tier->stats().damaged == 0 && tier->stats().write_errors == 0);
}

// A limit on the size of files is the disk that is full which every test may have.
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

// Few file descriptors, more segments.
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

// A child goes on with the parent's instance; their segments are not the same.
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

int main() {
  using namespace turbomind;
  test_checksum();
  test_round_trip();
  test_bad_arguments();
  test_beginnings();
  test_partial_pages();
  test_numerics();
  test_quota();
  test_compaction();
  test_unreadable_payloads();
  test_other_record_leaves();
  test_failed_sync();
  test_few_segments();
  test_instances();
  test_threads();
  test_full_disk();
  test_few_files();
  test_folder_goes();
  test_fork();
  std::puts("disk_tier_test: passed");
  return 0;
}
