// The pages of cache groups with windows: how many each group gets, which of them a sequence holds,
// and which are found again when a dialogue goes back.
#include <algorithm>
#include <list>
#include <vector>

#include "cache/kv_cache.h"
#include "cache/pool_sizes.h"
#include "core/error.h"
#include "tests/check.h"

namespace turbomind {
namespace {

std::vector<CacheGroup> groups_of(const std::vector<int>& windows, size_t page_bytes = 1000) {
  std::vector<CacheGroup> groups;
  for (const int window : windows) {
    CacheGroup& group = groups.emplace_back();
    group.kind = window > 0 ? CacheKind::window : CacheKind::full;
    group.window = window;
    group.page_bytes = page_bytes;
  }
  return groups;
}

int64_t bytes_of(const std::vector<CacheGroup>& groups, const std::vector<int64_t>& sizes) {
  int64_t bytes = 0;
  for (size_t g = 0; g < groups.size(); ++g)
    bytes += sizes[g] * static_cast<int64_t>(groups[g].page_bytes);
  return bytes;
}

// 26 layers of which 4 have full attention, as Gemma 3 1B has them.
void test_windows_leave_room_for_long_sequences() {
  std::vector<CacheGroup> groups = groups_of({512, 0});
  groups[0].page_bytes = 22 * 65536;
  groups[1].page_bytes = 4 * 65536;
  const PoolDemand demand{512 << 20, 0, 16, 512};
  const std::vector<int64_t> sizes = pool_sizes(groups, demand);
  CHECK(sizes[1] * kPageTokens >= 60000, "%ld tokens", static_cast<long>(sizes[1] * kPageTokens));
  CHECK(sizes[0] >= 16 * pages_of_window(512) + 2 * 512 / kPageTokens + 2 * pages_of_window(512));
  const int64_t bytes = bytes_of(groups, sizes);
  CHECK(bytes <= demand.bytes && bytes > demand.bytes - (2 << 20));
  PoolDemand again = demand;
  again.bytes = 0;
  again.pages = sizes[1];
  CHECK(pool_sizes(groups, again) == sizes, "the same sizes from the number of pages");
}

void test_small_caches_are_shared_equally() {
  const std::vector<CacheGroup> groups = groups_of({100, 0, 1000});
  for (const int64_t pages : {1, 4, 24})
    CHECK(pool_sizes(groups, {3000 * pages + 2999, 0, 16, 512}) == std::vector<int64_t>(3, pages));
  CHECK(pool_sizes(groups, {2999, 0, 16, 512}) == std::vector<int64_t>(3, 0), "not one page");
  CHECK(pool_sizes(groups, {-1, 0, 16, 512}) == std::vector<int64_t>(3, 0));
}

// Without full attention the widest window gets the most, since no group holds whole sequences.
void test_the_widest_window_is_first() {
  const auto sizes = pool_sizes(groups_of({100, 4096, 100}), {10000 * 1000, 0, 2, 64});
  CHECK(sizes[1] > sizes[0] && sizes[0] == sizes[2]);
  CHECK(pool_sizes(groups_of({4096}), {10 * 1000, 0, 2, 64})[0] == 10);
  CHECK(pool_sizes(groups_of({}), {1000, 0, 2, 64}).empty());
}

// More memory never means fewer pages, and all of it is used up to a page of each group.
void test_sizes_grow_with_the_memory() {
  std::vector<CacheGroup> groups = groups_of({70, 0, 400});
  groups[0].page_bytes = 700;
  groups[2].page_bytes = 3000;
  std::vector<int64_t> before(3, 0);
  for (int64_t bytes = 0; bytes < 3000000; bytes += 997) {
    const auto sizes = pool_sizes(groups, {bytes, 0, 4, 128});
    for (size_t g = 0; g < groups.size(); ++g) CHECK(sizes[g] >= before[g] && sizes[g] <= sizes[1]);
    CHECK(bytes_of(groups, sizes) <= bytes);
    CHECK(bytes_of(groups, pool_sizes(groups, {0, sizes[1] + 1, 4, 128})) > bytes);
    before = sizes;
  }
  for (const int64_t size : pool_sizes(groups, {int64_t{1} << 62, 0, 4096, 1 << 30}))
    CHECK(size > 0 && size <= (int64_t{1} << 31), "pages are numbered by 32 bits");
}

// A cache without memory, and its sequences. In the end the pages balance.
class Cache {
 public:
  Cache(const std::vector<int>& windows, const std::vector<int64_t>& pages)
      : kv_(memory(windows), pages, true) {}
  ~Cache() {
    check();
    for (Sequence& seq : sequences_) kv_.drop_pages(seq);
    check();
    kv_.evict_all();
    CHECK(kv_.free() == kv_.total());
  }

  Sequence& make() { return sequences_.emplace_back(kv_.make_sequence(0, "", 1)); }
  Sequence& fork(const Sequence& seq) { return sequences_.emplace_back(kv_.fork(seq)); }
  void check() const {
    std::vector<const Sequence*> all;
    for (const Sequence& seq : sequences_) all.push_back(&seq);
    kv_.check(all);
  }

  // Appends tokens and computes all that have no KV, `chunk` at a time.
  void compute(Sequence& seq, int64_t tokens, int64_t chunk = kPageTokens, int32_t token = 7) {
    for (int64_t i = 0; i < tokens; ++i)
      seq.tokens.push_back(token + static_cast<int32_t>(seq.tokens.size() % 5));
    while (seq.pending() > 0) {
      const int64_t step = kv_.writable_tokens(seq, std::min(chunk, seq.pending()));
      CHECK(step > 0, "%ld of %ld tokens", static_cast<long>(seq.written),
            static_cast<long>(seq.length()));
      CHECK(kv_.can_write(seq, step) &&
            (step == seq.pending() || !kv_.can_write(seq, step + 1) || step == chunk));
      kv_.prepare_write(seq, step);
      kv_.commit_write(seq, step);
    }
  }

  // Shortens the sequence and returns how many of its tokens have KV that is found.
  int64_t back_to(Sequence& seq, int64_t length) {
    kv_.truncate(seq, length);
    kv_.resume(seq, length);
    return seq.written;
  }

  KvCache& kv() { return kv_; }

 private:
  static PageMemory memory(const std::vector<int>& windows) {
    PageMemory memory;
    memory.groups = groups_of(windows);
    memory.allocate = [](const std::vector<int64_t>&) {};
    memory.copy = [](int, int32_t, int32_t) {};
    return memory;
  }

  KvCache kv_;
  std::list<Sequence> sequences_;
};

// The smallest pool of a window holds the window and the copy of a sealed page.
void test_smallest_pool_of_a_window() {
  for (const int window : {1, 2, 63, 64, 65, 66, 128, 129, 130, 200}) {
    const int64_t least = pages_of_window(window) + 1;
    for (const int64_t cut : {0, 1, 63, 64, 65}) {
      Cache cache({0, window}, {100, least});
      CHECK(cache.kv().max_context() == 100 * kPageTokens);
      Sequence& seq = cache.make();
      cache.compute(seq, 1000, 1000);
      cache.back_to(seq, seq.length() - cut);
      cache.compute(seq, 500, 500, 9);
    }
    Cache small({0, window}, {100, least - 1});
    CHECK(small.kv().max_context() == (least - 1) * kPageTokens, "no room for the copy");
  }
}

// A query at the last page border reaches every page that is held, so that a sequence of one page
// more or less costs as much.
void test_a_sequence_holds_its_window() {
  for (const int window : {1, 64, 65, 100, 512}) {
    Cache cache({0, window}, {100, 40});
    Sequence& seq = cache.make();
    for (int i = 0; i < 300; ++i) {
      cache.compute(seq, 1 + i % 40);
      const auto held = static_cast<int64_t>(seq.pages[1].size()) - seq.first_held[1];
      CHECK(held <= pages_of_window(window), "%ld pages of a window of %d", static_cast<long>(held),
            window);
      CHECK(seq.first_held[1] <= cache.kv().first_reachable(1, seq.written));
      if (seq.length() > 6000) break;
    }
  }
}

// Pages with which the last turn or its reply begins are evicted like the rest of the session, the
// others first, though more tokens than the pool holds were computed since.
void test_last_turn_is_found_again() {
  for (const int window : {1, 50, 64, 100, 128, 300})
    for (const int64_t begin : {640, 641, 700, 703}) {
      const int64_t pages = 3 * pages_of_window(window) + 4;
      for (const bool retries : {false, true}) {
        Cache cache({0, window}, {200, pages});
        Sequence& seq = cache.make();
        cache.compute(seq, begin - 1);
        seq.tokens.push_back(7);  // the last token of a reply has no KV
        seq.last_turn = {begin, begin + 500};
        cache.compute(seq, 500, 200);
        cache.compute(seq, 3000, 1);
        const int64_t to = retries ? begin + 500 : begin;
        const int64_t found = cache.back_to(seq, to);
        CHECK(found >= to - kPageTokens && found >= (to - retries) / kPageTokens * kPageTokens,
              "%ld of %ld tokens of a window of %d", static_cast<long>(found),
              static_cast<long>(to), window);
      }
    }
}

// What was retained for a turn long ago is evicted before what the last one needs.
void test_turns_of_long_ago_leave_first() {
  Cache cache({0, 100}, {400, 14});
  Sequence& seq = cache.make();
  for (int turn = 0; turn < 20; ++turn) {
    const int64_t begin = seq.length();
    seq.last_turn = {begin, begin + 150};
    cache.compute(seq, 150);
    cache.compute(seq, 500, 1);
    Sequence& again = cache.fork(seq);
    CHECK(cache.back_to(again, begin) >= begin - kPageTokens, "turn %d", turn);
    cache.kv().drop_pages(again);
    cache.check();
  }
}

// Cached pages that windows have moved past are counted, and are the first that take() evicts.
void test_out_of_reach_pages_are_counted() {
  Cache cache({0, 64}, {60, 60});
  Sequence &seq = cache.make(), &other = cache.make();
  PagePool& pool = cache.kv().pool(1);
  cache.compute(seq, 1024);
  CHECK(pool.out_of_reach() == pool.cached() && pool.cached() == 15);
  CHECK(cache.kv().pool(0).out_of_reach() == 0);
  seq.last_turn = {1024, 1030};
  cache.compute(seq, 1024, 1);
  CHECK(pool.out_of_reach() == pool.cached() - 1, "the page where the last turn begins");
  cache.compute(other, 640, 64, 20);
  cache.kv().drop_pages(other);
  CHECK(pool.free() > 0);
  const int64_t useful = pool.cached() - pool.out_of_reach();
  std::vector<int32_t> taken;
  while (pool.out_of_reach() > 0) taken.push_back(pool.take());
  CHECK(pool.free() == 0 && pool.cached() == useful);
  for (const int32_t page : taken) pool.release(page, 0);
}

// A sequence that takes over another one's prefix can be shortened to its last page border too.
void test_shared_prefix_holds_its_window() {
  Cache cache({0, 100}, {100, 30});
  Sequence &seq = cache.make(), &other = cache.make();
  cache.compute(seq, 700);
  other.tokens = seq.tokens;
  CHECK(cache.kv().share(other, seq, 690));
  CHECK(other.first_held[1] == seq.first_held[1]);
  CHECK(cache.back_to(other, 650) == 650, "the same page");
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  return turbomind::run_cases(argc, argv,
                              {
                                  TM_CASE(turbomind::test_windows_leave_room_for_long_sequences),
                                  TM_CASE(turbomind::test_small_caches_are_shared_equally),
                                  TM_CASE(turbomind::test_the_widest_window_is_first),
                                  TM_CASE(turbomind::test_sizes_grow_with_the_memory),
                                  TM_CASE(turbomind::test_smallest_pool_of_a_window),
                                  TM_CASE(turbomind::test_a_sequence_holds_its_window),
                                  TM_CASE(turbomind::test_last_turn_is_found_again),
                                  TM_CASE(turbomind::test_turns_of_long_ago_leave_first),
                                  TM_CASE(turbomind::test_out_of_reach_pages_are_counted),
                                  TM_CASE(turbomind::test_shared_prefix_holds_its_window),
                              });
}
