// The disk tier against plain maps: a page it returns is exactly what was written.
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <string>
#include <thread>

#include "core/error.h"
#include "core/xxh64.h"
#include "tests/cache/stored_pages.h"

namespace turbomind {
namespace {

// The empty text of the specification, and values of its reference program.
void test_checksum() {
  const auto hash = [](const std::string& s) { return xxh64(s.data(), s.size(), 0); };
  CHECK(hash("") == 0xef46db3751d8e999u);
  CHECK(hash("a") == 0xd24ec4f1a98c6e5bu);
  CHECK(hash("abc") == 0x44bc2cf5ad770999u);
  CHECK(hash("Nobody inspects the spammish repetition") == 0xfbcea83c8a378bf1u);
}

void test_round_trip() {
  const Folder folder;
  const BlockHash root = root_key("a model", 0, "");
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
  page.tokens[1] = 2;  // does not match its hash any more
  CHECK(!write(*tier, page) && tier->stats().write_errors == 1);
  CHECK(!write(*tier, make_page({}, Tokens(65, 1))));
  for (const char* name : {"", "/dev/null/pages", "/proc/none/pages"}) {
    DiskTier::Options options;
    options.folder = name;
    try {
      DiskTier other(options);
      CHECK(!"an impossible folder was accepted");
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

void test_prefixes() {
  const Folder folder;
  auto tier = open(folder);
  std::mt19937 random(7);
  const auto random_tokens = [&](int limit) {
    Tokens tokens(1 + random() % limit);
    for (int32_t& t : tokens) t = static_cast<int32_t>(random() % 3);
    return tokens;
  };
  const BlockHash parents[] = {root_key("a", 0, ""), root_key("b", 0, "")};
  std::vector<StoredPage> pages;
  for (int i = 0; i < 300; ++i) {
    pages.push_back(
        make_page(parents[i % 2], random_tokens(i % 5 ? 12 : kPageTokens), 64, i / 2 % 2));
    CHECK(write(*tier, pages.back()));
  }
  for (int i = 0; i < 500; ++i) {
    const Tokens tokens = random_tokens(kPageTokens);
    const int group = i / 2 % 2;
    int want = 0, got = -1;
    for (const StoredPage& page : pages) {
      if (page.parent == parents[i % 2] && page.group == group)
        want = std::max(want, naive_shared(page.tokens, tokens));
    }
    const auto ref = tier->find_prefix(parents[i % 2], group, tokens.data(),
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
  const BlockHash root = root_key("a model", 0, "");
  Tokens tokens(kPageTokens, 5);
  const StoredPage full = make_page(root, tokens);
  const StoredPage ten = make_page(root, Tokens(10, 5)), twenty = make_page(root, Tokens(20, 5));
  CHECK(write(*tier, ten) && write(*tier, twenty));
  CHECK(!has(*tier, ten) && read(*tier, twenty));  // replaced by the longer one
  CHECK(write(*tier, ten) && !has(*tier, ten));    // the longer one is enough
  CHECK(write(*tier, full) && !has(*tier, twenty));
  const StoredPage partial = make_page(full.key, Tokens(3, 1));
  const StoredPage next = make_page(full.key, Tokens(kPageTokens, 2));
  CHECK(write(*tier, partial) && write(*tier, next));
  tier->remove({full.key});
  CHECK(!has(*tier, full) && !has(*tier, partial) && !has(*tier, next));
  CHECK(write(*tier, full) && write(*tier, partial) && write(*tier, next) && write(*tier, ten));
  tier->retain_only({full.key});
  CHECK(has(*tier, full) && has(*tier, partial) && !has(*tier, next));
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
  auto tier = open(folder, quota);  // priorities and uses survive an orderly end
  auto fresh = make_chain(4, 9);
  for (StoredPage& p : fresh) p.retention_priority = 1;
  // The end of the least recently used chain is evicted first: a prefix is useful without its end.
  CHECK(write(*tier, fresh[0]) && !has(*tier, old[3]) && has(*tier, old[0]));
  for (int i = 1; i < 4; ++i) CHECK(write(*tier, fresh[i]));
  CHECK(!has(*tier, old[0]) && has(*tier, used[2]) && tier->stats().evicted == 4);
  for (int i = 4; i < 7; ++i) CHECK(write(*tier, fresh[i]));
  CHECK(!has(*tier, used[0]));
  CHECK(!write(*tier, fresh[7]));  // only its own ancestors and pinned pages are left
  for (const StoredPage& page : pinned) CHECK(read(*tier, page));
  for (int i = 0; i < 7; ++i) CHECK(read(*tier, fresh[i]));
  CHECK(tier->stats().bytes <= quota && tier->stats().write_errors == 0);
  CHECK(!write(*tier, make_page({}, Tokens(1, 1), static_cast<size_t>(quota))));
  // When all pages are pinned, pinned ones are evicted.
  tier->touch(keys_of(fresh), DiskTier::kPinned);
  StoredPage page = make_page({}, Tokens(kPageTokens, 9));
  CHECK(!write(*tier, page));
  page.retention_priority = DiskTier::kPinned;
  CHECK(write(*tier, page) && !has(*tier, pinned[2]));
  tier.reset();
  tier = open(folder, quota / 3);
  while (tier->stats().bytes > quota / 3) tier->maintain();
  CHECK(tier->stats().pages == 3 && has(*tier, page));
}

// Instances write, remove, compact and refresh in turn, against the set of pages that may exist.
void test_instances() {
  const Folder folder;
  std::mt19937 random(11);
  std::vector<StoredPage> pages;
  for (int salt = 0; salt < 6; ++salt) {
    for (const StoredPage& page : make_chain(salt, 8, 3000 + 2000 * salt)) pages.push_back(page);
  }
  std::vector<std::unique_ptr<DiskTier>> tiers(3);
  for (auto& tier : tiers) tier = open(folder, 0, 1 << 17);
  std::map<uint64_t, bool> written;  // by key.lo; false: removed by an instance
  for (int i = 0; i < 2000; ++i) {
    auto& tier = tiers[random() % tiers.size()];
    const size_t number = random() % pages.size();
    const StoredPage& page = pages[number];
    switch (random() % 10) {
      case 0:
        tier->remove({page.key});  // and with it those that follow, as far as their parents exist
        for (size_t at = number; at == number || (at % 8 != 0 && written[pages[at].key.lo]); ++at)
          written[pages[at].key.lo] = false;
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
        tier->find_prefix(page.parent, 0, page.tokens.data(), 5, &shared);
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

// Scans let lookups pass after each record: of another process's pages, and of uses to be saved.
void test_passes() {
  const Folder folder;
  const BlockHash root = root_key("a model", 0, "");
  std::vector<StoredPage> pages;
  for (int i = 0; i < 300; ++i) pages.push_back(make_page(root, Tokens(1, 100 + i)));
  auto tier = open(folder);
  {
    auto other = open(folder);
    for (const StoredPage& page : pages) CHECK(write(*other, page));
  }
  const int64_t before = tier->passes();
  tier->refresh();
  CHECK(tier->stats().pages == 300 && tier->passes() - before >= 300);
  const int64_t refreshed = tier->passes();
  tier->sync();
  CHECK(tier->passes() - refreshed >= 300);
  const int64_t synced = tier->passes();
  tier->touch(keys_of(pages), 1);
  CHECK(tier->passes() - synced >= 300);
}

// A thread that waits for the mutex of a scan gets it before the scan ends.
void test_waiting_lookup_passes() {
  IndexMutex mutex;
  std::atomic<bool> passed{false};
  mutex.lock();
  std::thread lookup([&] {
    const std::lock_guard lock(mutex);
    passed = true;
  });
  while (!passed) mutex.pass();
  mutex.unlock();
  lookup.join();
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(test_checksum),
                                  TM_CASE(test_round_trip),
                                  TM_CASE(test_bad_arguments),
                                  TM_CASE(test_prefixes),
                                  TM_CASE(test_partial_pages),
                                  TM_CASE(test_numerics),
                                  TM_CASE(test_quota),
                                  TM_CASE(test_instances),
                                  TM_CASE(test_passes),
                                  TM_CASE(test_waiting_lookup_passes),
                                  TM_CASE(test_threads),
                              });
}
