// The host tier: lookups against a plain search, order of eviction, and many threads on a small
// quota, where each payload must be that of its page. Also for TSan.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "tests/check.h"
#include "tiers/host_tier.h"

namespace turbomind {
namespace {

using Tokens = std::vector<int32_t>;
using Bytes = std::vector<uint8_t>;
constexpr size_t kTokenBytes = 16;  // of payload
constexpr size_t kPageBytes = kPageTokens * kTokenBytes;

HostTier::Options options(int64_t pages, std::vector<CacheKind> groups = {CacheKind::full}) {
  HostTier::Options o;
  o.quota = pages * static_cast<int64_t>(kPageBytes);
  o.numerics = "here";
  o.groups = std::move(groups);
  o.page_bytes = kPageBytes;
  return o;
}

StoredPage make_page(const BlockHash& parent, Tokens tokens, int group = 0, float priority = 0) {
  StoredPage page;
  page.parent = parent;
  page.key = next_key(parent, tokens.data(), static_cast<int>(tokens.size()));
  page.group = group;
  page.fingerprint = "model";
  page.numerics = "here";
  page.heads = 2;
  page.payload_bytes = tokens.size() * kTokenBytes;
  page.tokens = std::move(tokens);
  page.retention_priority = priority;
  return page;
}

Tokens run_of(int32_t first, int count = kPageTokens) {
  Tokens tokens(count);
  for (int i = 0; i < count; ++i) tokens[i] = first + i;
  return tokens;
}

// Returns bytes that differ from page to page and within a page.
Bytes payload_of(const StoredPage& page) {
  std::mt19937_64 random(page.key.lo + static_cast<uint64_t>(page.group));
  Bytes bytes(page.payload_bytes);
  for (auto& b : bytes) b = static_cast<uint8_t>(random());
  return bytes;
}

bool put(HostTier& tier, const StoredPage& page) {
  return tier.write(page, payload_of(page).data());
}

bool has(const HostTier& tier, const StoredPage& page) {
  return tier.find(page.key, page.group).has_value();
}

// Reads and checks the page at `ref`; returns false when it has been evicted.
bool get(HostTier& tier, const PageRef& ref) {
  StoredPage page;
  Bytes payload(ref.payload_bytes + 8, 0xA5);
  if (!tier.read(ref, &page, payload.data())) return false;
  CHECK(page.key == ref.key && page.parent == ref.parent && page.group == ref.group);
  CHECK(static_cast<int>(page.tokens.size()) == ref.count);
  CHECK(page.key == next_key(page.parent, page.tokens.data(), ref.count));
  CHECK(page.payload_bytes == ref.payload_bytes);
  for (size_t i = ref.payload_bytes; i < payload.size(); ++i) CHECK(payload[i] == 0xA5);
  payload.resize(ref.payload_bytes);
  CHECK(payload == payload_of(page));
  return true;
}

std::vector<StoredPage> make_chain(const BlockHash& root, int pages, int group = 0,
                                   float priority = 0) {
  std::vector<StoredPage> chain;
  for (int i = 0; i < pages; ++i)
    chain.push_back(make_page(i ? chain.back().key : root, run_of(i * 100), group, priority));
  return chain;
}

void test_facts() {
  HostTier tier(options(8));
  StoredPage page = make_page({1, 2}, run_of(5, 21), 0, 3.5f);
  page.fingerprint = "a model";
  page.first_head = 4;
  CHECK(put(tier, page));
  const auto ref = tier.find(page.key, 0);
  CHECK(ref && ref->count == 21 && ref->payload_bytes == 21 * kTokenBytes && !ref->foreign);
  CHECK(!tier.find(page.key, 1) && !tier.find(page.parent, 0));
  StoredPage read;
  Bytes payload(ref->payload_bytes);
  CHECK(tier.read(*ref, &read, payload.data()) && payload == payload_of(page));
  CHECK(read.fingerprint == "a model" && read.numerics == "here" && read.tokens == page.tokens);
  CHECK(read.first_head == 4 && read.heads == 2 && read.retention_priority == 3.5f);
  tier.touch({page.key}, 1.0f);
  CHECK(tier.read(*ref, &read, payload.data()) && read.retention_priority == 1.0f);
  page.retention_priority = 2;
  CHECK(put(tier, page));  // exists: only raises the priority
  page.retention_priority = 0;
  CHECK(put(tier, page));
  CHECK(tier.read(*ref, &read, payload.data()) && read.retention_priority == 2.0f);
  const TierStats stats = tier.stats();
  CHECK(stats.pages == 1 && stats.writes == 1 && stats.reads == 3 && stats.evicted == 0);
  CHECK(stats.bytes >= 21 * 16 && stats.bytes < 21 * 16 + 64 && stats.quota == 8 * 1024);
}

// Memory in slabs, allocated on demand until there is no more.
struct Slabs {
  int64_t made = 0, most = 1000;
  HostMemory memory(size_t slab_bytes, size_t reserve_bytes = 0) {
    return {[this](size_t bytes) {
              if (made == most) throw std::bad_alloc();
              ++made;
              return HostBlock(new uint8_t[bytes], std::default_delete<uint8_t[]>());
            },
            slab_bytes, reserve_bytes};
  }
};

void test_slabs() {
  Slabs slabs;
  HostTier::Options o = options(10);
  o.memory = slabs.memory(3 * kPageBytes / 2);  // pages that span two slabs
  HostTier tier(o);
  CHECK(slabs.made == 0);
  const auto chain = make_chain({1, 1}, 12);
  for (int i = 0; i < 9; ++i) CHECK(put(tier, chain[i]));
  CHECK(slabs.made == 6);
  CHECK(put(tier, chain[9]) && slabs.made == 7);  // the last slab has the rest of the quota
  CHECK(!put(tier, chain[10]) && slabs.made == 7);
  for (int i = 0; i < 10; ++i) CHECK(get(tier, *tier.find(chain[i].key, 0)));

  Slabs few;
  few.most = 2;
  o.memory = few.memory(2 * kPageBytes);
  HostTier small(o);
  std::vector<StoredPage> pages;
  for (int i = 0; i < 6; ++i) {  // no chain: the oldest is evicted
    pages.push_back(make_page({2, uint64_t(i)}, run_of(i)));
    CHECK(put(small, pages.back()));
  }
  CHECK(few.made == 2 && small.stats().pages == 4 && small.stats().evicted == 2);
  for (int i = 2; i < 6; ++i) CHECK(get(small, *small.find(pages[i].key, 0)));

  Slabs none;
  none.most = 0;
  o.memory = none.memory(2 * kPageBytes);
  HostTier empty(o);
  CHECK(!put(empty, pages[0]) && empty.stats().pages == 0);
}

// Some slabs are allocated at the start, and one more at a time by maintain(), so that writes do
// not wait for memory.
void test_slabs_ahead() {
  Slabs slabs;
  HostTier::Options o = options(8);
  o.memory = slabs.memory(2 * kPageBytes, 3 * kPageBytes);
  HostTier tier(o);
  CHECK(slabs.made == 2);
  tier.maintain();
  CHECK(slabs.made == 2);
  const auto chain = make_chain({1, 1}, 9);
  for (int i = 0; i < 3; ++i) CHECK(put(tier, chain[i]) && slabs.made == 2);
  for (int64_t made : {3, 3}) {
    tier.maintain();
    CHECK(slabs.made == made);  // room for three again
  }
  for (int i = 3; i < 6; ++i) CHECK(put(tier, chain[i]) && slabs.made == 3);
  for (int64_t made : {4, 4, 4}) {
    tier.maintain();
    CHECK(slabs.made == made);  // all that the quota allows
  }
  for (int i = 6; i < 8; ++i) CHECK(put(tier, chain[i]));
  tier.maintain();
  CHECK(!put(tier, chain[8]) && slabs.made == 4 && tier.stats().pages == 8);

  Slabs few;
  few.most = 1;
  o.memory = few.memory(2 * kPageBytes, 8 * kPageBytes);
  HostTier small(o);
  small.maintain();
  CHECK(few.made == 1 && put(small, chain[0]) && put(small, chain[1]) && !put(small, chain[2]));
}

Bytes bytes_of(const BorrowedPage& borrowed) {
  Bytes bytes;
  for (const PayloadPart& part : borrowed.parts)
    bytes.insert(bytes.end(), part.data, part.data + part.bytes);
  return bytes;
}

void fill(const BorrowedPage& borrowed, const Bytes& from) {
  size_t at = 0;
  for (const PayloadPart& part : borrowed.parts) {
    std::memcpy(part.data, from.data() + at, part.bytes);
    at += part.bytes;
  }
  CHECK(at == from.size());
}

// A borrowed payload does not change, whatever happens to its page.
void test_borrowed() {
  HostTier tier(options(2));
  const auto chain = make_chain({1, 1}, 2);
  {
    const auto borrowed = tier.reserve(chain[0]);
    CHECK(borrowed && borrowed->parts.size() == 1 && !has(tier, chain[0]));
    fill(*borrowed, payload_of(chain[0]));
    CHECK(tier.insert(*borrowed) && has(tier, chain[0]));
    CHECK(!tier.reserve(chain[0]));  // exists
    const auto dropped = tier.reserve(chain[1]);
    CHECK(dropped && !has(tier, chain[1]) && tier.stats().pages == 1);
  }
  CHECK(tier.stats().bytes == int64_t(kPageBytes));  // pieces that were not inserted are released
  CHECK(put(tier, chain[1]));
  auto borrowed = tier.borrow(*tier.find(chain[0].key, 0));
  CHECK(borrowed && borrowed->page.key == chain[0].key &&
        bytes_of(*borrowed) == payload_of(chain[0]));
  const PageRef ref = *tier.find(chain[0].key, 0);
  tier.remove({chain[0].key, chain[1].key});
  CHECK(!tier.borrow(ref) && tier.stats().pages == 0);
  const auto other = make_chain({3, 3}, 2);
  CHECK(put(tier, other[0]) && !put(tier, other[1]));  // half of the memory is borrowed
  CHECK(bytes_of(*borrowed) == payload_of(chain[0]));
  borrowed.reset();
  CHECK(put(tier, other[1]));
  // Two writers of one page: the first one wins.
  HostTier two(options(2));
  const auto first = two.reserve(chain[0]), second = two.reserve(chain[0]);
  fill(*first, payload_of(chain[0]));
  CHECK(two.insert(*first) && two.insert(*second));
  CHECK(two.stats().pages == 1 && get(two, *two.find(chain[0].key, 0)));
  // Pages of one size, written and evicted in any order, are contiguous again.
  std::vector<StoredPage> pages;
  HostTier churn(options(8));
  for (int i = 0; i < 40; ++i) {
    pages.push_back(make_page({4, uint64_t(i)}, run_of(i)));
    CHECK(put(churn, pages.back()));
    CHECK(churn.borrow(*churn.find(pages.back().key, 0))->parts.size() == 1);
    if (i % 7 == 3) churn.remove({pages[i - 3].key, pages[i - 1].key});
  }
}

void test_foreign() {
  HostTier tier(options(8));
  StoredPage page = make_page({1, 2}, run_of(5));
  page.numerics = "there";
  CHECK(put(tier, page));
  const auto foreign = tier.find(page.key, 0);
  CHECK(foreign && foreign->foreign);
  page.numerics = "here";
  CHECK(put(tier, page));  // replaces it
  const auto own = tier.find(page.key, 0);
  CHECK(own && !own->foreign && get(tier, *own) && !get(tier, *foreign));
  page.numerics = "there";
  CHECK(put(tier, page) && !tier.find(page.key, 0)->foreign && tier.stats().pages == 1);
}

void test_refused() {
  HostTier tier(options(2));
  StoredPage wrong_key = make_page({1, 2}, run_of(5));
  wrong_key.key.hi ^= 1;
  CHECK(!put(tier, wrong_key));
  CHECK(!put(tier, make_page({1, 2}, run_of(0, 65))));
  CHECK(!put(tier, make_page({1, 2}, {})));
  CHECK(!put(tier, make_page({1, 2}, run_of(0), 1)));
  CHECK(!put(tier, make_page({1, 2}, run_of(0), -1)));
  CHECK(tier.stats().damaged == 5 && tier.stats().pages == 0 && tier.stats().bytes == 0);
  HostTier none(options(0));
  CHECK(!put(none, make_page({1, 2}, run_of(5))) && none.stats().damaged == 0);
}

// Random pages after a few parents, some of which are pages; against a search of all pages.
void test_names() {
  std::mt19937 random(3);
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  HostTier tier(options(100000));
  std::map<std::pair<uint64_t, int>, StoredPage> all;
  std::vector<BlockHash> parents = {{1, 1}, {1, 2}, {2, 1}};
  const auto random_tokens = [&] {
    Tokens tokens(below(3) ? 1 + below(6) : kPageTokens);
    for (auto& t : tokens) t = below(3) - 1;
    return tokens;
  };
  for (int i = 0; i < 1500; ++i) {
    const StoredPage page = make_page(parents[below(parents.size())], random_tokens());
    CHECK(put(tier, page));
    all.insert({{page.key.lo, page.group}, page});
    if (page.tokens.size() == kPageTokens && parents.size() < 40) parents.push_back(page.key);
    if (i % 5 == 0) {
      const auto gone = std::next(all.begin(), below(all.size()))->second;
      tier.remove({gone.key});
      std::erase_if(all, [&](const auto& it) {
        const StoredPage& p = it.second;
        return p.key == gone.key || (p.parent == gone.key && p.tokens.size() < kPageTokens);
      });
    }
    const BlockHash parent = parents[below(parents.size())];
    const Tokens wanted = random_tokens();
    int best = 0, shared = -1;
    for (const auto& [name, p] : all) {
      int n = 0;
      while (p.parent == parent && n < int(std::min(p.tokens.size(), wanted.size())) &&
             p.tokens[n] == wanted[n])
        ++n;
      best = std::max(best, n);
    }
    const auto ref =
        tier.find_prefix(parent, 0, wanted.data(), static_cast<int>(wanted.size()), &shared);
    CHECK(shared == best && ref.has_value() == (best > 0));
    if (ref) {
      const StoredPage& found = all.at({ref->key.lo, 0});
      CHECK(found.parent == parent && ref->count == static_cast<int>(found.tokens.size()));
      CHECK(std::equal(wanted.begin(), wanted.begin() + best, found.tokens.begin()));
      CHECK(get(tier, *ref));
    }
  }
  CHECK(tier.stats().pages == static_cast<int64_t>(all.size()));
  std::vector<BlockHash> retained;
  for (const auto& [name, p] : all)
    if (below(2)) retained.push_back(p.key);
  tier.retain_only(retained);
  const auto stays = [&](const BlockHash& key) {
    return std::find(retained.begin(), retained.end(), key) != retained.end();
  };
  for (const auto& [name, p] : all) {
    const bool want = stays(p.key) || (p.tokens.size() < kPageTokens && stays(p.parent));
    CHECK(has(tier, p) == want);
    if (want) CHECK(get(tier, *tier.find(p.key, 0)));
  }
  tier.retain_only({});
  CHECK(tier.stats().pages == 0 && tier.stats().bytes == 0);
}

void test_groups() {
  HostTier tier(options(8, {CacheKind::full, CacheKind::window}));
  const StoredPage a = make_page({1, 1}, run_of(0), 0), b = make_page({1, 1}, run_of(0), 1);
  const StoredPage tail = make_page(a.key, run_of(64, 9), 1);
  int shared = 0;
  CHECK(put(tier, a) && put(tier, b) && put(tier, tail) && a.key == b.key);
  CHECK(get(tier, *tier.find(a.key, 0)) && get(tier, *tier.find(a.key, 1)));
  CHECK(!tier.find_prefix(a.key, 0, tail.tokens.data(), 9, &shared) && shared == 0);
  CHECK(tier.find_prefix(a.key, 1, tail.tokens.data(), 5, &shared) && shared == 5);
  tier.remove({a.key});
  CHECK(tier.stats().pages == 0);
}

void test_order() {
  HostTier tier(options(4));
  std::vector<StoredPage> p;
  for (int i = 0; i < 8; ++i) p.push_back(make_page({1, 1}, run_of(i * 100)));
  for (int i = 0; i < 4; ++i) CHECK(put(tier, p[i]));
  CHECK(get(tier, *tier.find(p[0].key, 0)));  // used: 1 is the oldest now
  CHECK(put(tier, p[4]) && !has(tier, p[1]) && has(tier, p[0]));
  tier.touch({p[2].key}, 1.0f);
  tier.touch({p[0].key}, -1.0f);
  CHECK(put(tier, p[5]) && !has(tier, p[0]) && has(tier, p[2]));
  tier.touch({p[2].key, p[3].key, p[4].key, p[5].key}, 2.0f);
  CHECK(!put(tier, p[6]));  // the others have higher priorities
  p[6].retention_priority = 2;
  CHECK(put(tier, p[6]) && !has(tier, p[2]) && tier.stats().evicted == 3);
  tier.touch({p[6].key}, std::nanf(""));  // not a number: the lowest priority
  p[7].retention_priority = 2;
  CHECK(put(tier, p[7]) && !has(tier, p[6]) && tier.stats().pages == 4);
  CHECK(tier.stats().bytes == 4 * 1024);
}

// A page that others follow is not evicted, however old; pages of a window are evicted oldest
// first.
void test_followed() {
  HostTier tier(options(4, {CacheKind::full, CacheKind::window}));
  const auto chain = make_chain({1, 1}, 3);
  for (const auto& page : chain) CHECK(put(tier, page));
  tier.touch({chain[0].key}, -5.0f);
  tier.touch({chain[1].key}, -9.0f);
  CHECK(put(tier, make_page({7, 7}, run_of(0))));
  CHECK(put(tier, make_page({7, 7}, run_of(1))));
  CHECK(has(tier, chain[0]) && has(tier, chain[1]) && !has(tier, chain[2]));
  CHECK(put(tier, make_page({7, 7}, run_of(2))));
  CHECK(has(tier, chain[0]) && !has(tier, chain[1]));
  CHECK(put(tier, make_page({7, 7}, run_of(3))) && !has(tier, chain[0]));
  tier.retain_only({});
  const auto window = make_chain({1, 1}, 6, 1);
  for (const auto& page : window) CHECK(put(tier, page));
  CHECK(!has(tier, window[0]) && !has(tier, window[1]) && has(tier, window[2]));
}

// Partial pages use only the pieces they need; released pieces serve full pages again.
void test_memory() {
  HostTier tier(options(4));
  for (int i = 0; i < 64; ++i) CHECK(put(tier, make_page({1, 1}, run_of(i * 100, 4))));
  CHECK(tier.stats().pages == 64 && tier.stats().evicted == 0 && tier.stats().bytes == 4 * 1024);
  for (int round = 0; round < 50; ++round) {
    CHECK(put(tier, make_page({2, 2}, run_of(round, 1 + round * 7 % 64))));
    CHECK(tier.stats().bytes <= 4 * 1024);
  }
  tier.retain_only({});
  for (int i = 0; i < 4; ++i) CHECK(put(tier, make_page({3, 3}, run_of(i * 100))));
  CHECK(tier.stats().pages == 4);
  for (int i = 0; i < 4; ++i) {
    const StoredPage page = make_page({3, 3}, run_of(i * 100));
    CHECK(get(tier, *tier.find(page.key, 0)));
  }
}

// Large payloads on few pieces, so that copies overlap with evictions.
class Crowd {
 public:
  Crowd() : tier_(make_options()) {
    for (int chain = 0; chain < 3; ++chain)
      for (int group = 0; group < 2; ++group) {
        for (const auto& page : make_chain({uint64_t(chain), 9}, 4, group)) add(page);
        add(make_page(pages_.back().key, run_of(900, 13), group));
      }
  }

  void run() {
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) threads.emplace_back([this, t] { work(t); });
    for (auto& t : threads) t.join();
    CHECK(found_ > 20 && tier_.stats().evicted > 20 && tier_.stats().damaged == 0);
    tier_.retain_only({});
    CHECK(tier_.stats().pages == 0 && tier_.stats().bytes == 0);
  }

 private:
  static constexpr size_t kScale = 64;  // of payloads
  static constexpr int64_t kPages = 6;
  static HostTier::Options make_options() {
    HostTier::Options o = options(kPages * kScale, {CacheKind::full, CacheKind::window});
    o.page_bytes *= kScale;
    return o;
  }

  void add(StoredPage page) {
    page.payload_bytes *= kScale;
    payloads_.push_back(payload_of(page));
    pages_.push_back(std::move(page));
  }

  void read(size_t i, const std::optional<PageRef>& ref) {
    if (!ref) return;
    StoredPage page;
    Bytes payload(ref->payload_bytes);
    if (!tier_.read(*ref, &page, payload.data())) return;
    ++found_;
    if (page.key == pages_[i].key && page.group == pages_[i].group)
      CHECK(page.tokens == pages_[i].tokens && payload == payloads_[i]);
  }

  void work(unsigned seed) {
    std::mt19937 random(seed);
    for (int step = 0; step < 1000; ++step) {
      const size_t i = random() % pages_.size();
      StoredPage page = pages_[i];
      int shared = 0;
      const unsigned action = random() % 16;
      if (action == 0) {
        tier_.remove({page.key});
      } else if (action == 1) {
        tier_.touch({page.parent, page.key}, static_cast<float>(random() % 3));
      } else if (action == 2 && random() % 16 == 0) {
        tier_.retain_only({page.key, page.parent});
      } else if (action == 3) {
        CHECK(tier_.stats().bytes <= kPages * static_cast<int64_t>(kScale * kPageBytes));
      } else if (action == 4) {
        read(i, tier_.find_prefix(page.parent, page.group, page.tokens.data(), 7, &shared));
      } else if (action < 10) {
        page.retention_priority = static_cast<float>(random() % 3);
        tier_.write(page, payloads_[i].data());
      } else {
        read(i, tier_.find(page.key, page.group));
      }
    }
  }

  HostTier tier_;
  std::vector<StoredPage> pages_;
  std::vector<Bytes> payloads_;
  std::atomic<int64_t> found_{0};
};

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(turbomind::test_facts),
                                  TM_CASE(turbomind::test_slabs),
                                  TM_CASE(turbomind::test_slabs_ahead),
                                  TM_CASE(turbomind::test_borrowed),
                                  TM_CASE(turbomind::test_foreign),
                                  TM_CASE(turbomind::test_refused),
                                  TM_CASE(turbomind::test_names),
                                  TM_CASE(turbomind::test_groups),
                                  TM_CASE(turbomind::test_order),
                                  TM_CASE(turbomind::test_followed),
                                  TM_CASE(turbomind::test_memory),
                                  {"crowd", [] { turbomind::Crowd().run(); }},
                              });
}
