#include "tiers/fetch/page_fetcher.h"

#include <algorithm>
#include <utility>

namespace turbomind {

bool PageFetcher::has_room(const FetchPlan& plan, const std::vector<int64_t>& promised) const {
  std::vector<int64_t> needed = promised;
  for (const PlannedPage& at : plan.pages) {
    if (at.load) continue;
    const PagePool& pool = kv_.pool(at.group);
    needed[at.group] += at.below() || pool.references(at.device) == 0;
  }
  for (size_t g = 0; g < needed.size(); ++g)
    if (needed[g] > kv_.pool(static_cast<int>(g)).available()) return false;
  return true;
}

void PageFetcher::begin(Sequence& seq, Run* run, const FetchPlan& plan, bool exact,
                        Clock::time_point deadline) {
  // All that may throw, on the side.
  Fetches fetches(1);
  Fetch& fetch = fetches.front();
  fetch.seq = &seq;
  fetch.run = run;
  fetch.deadline = deadline;
  describe(fetch, seq, plan);
  PageLoads fresh;
  PageMover::Moves moves;
  for (const PlannedPage& at : plan.pages) {
    PageLoad* load = at.load;
    if (at.below()) {
      load = &fresh.emplace_back(make_load(seq, at, plan, exact));
      load->move->owner = load;
      moves.push_back(load->move);
    }
    if (load) fetch.slots.push_back({at.group, at.index, load});
  }
  // From here on nothing throws. What is on the device is held before anything makes room.
  for (const PlannedPage& at : plan.pages) {
    if (at.device < 0) continue;
    kv_.pool(at.group).reference(at.device);
    fetch.tables.pages[at.group][at.index] = at.device;
  }
  for (PageLoad& load : fresh) load.move->page = load.page = kv_.pool(load.group).take();
  for (const Slot& slot : fetch.slots) ++slot.load->wanted;
  fetch.open = static_cast<int>(fetch.slots.size());
  loads_.splice(loads_.end(), fresh);
  fetches_.splice(fetches_.end(), fetches);
  mover_.post(std::move(moves));
  if (run) run->fetching = true;
}

void PageFetcher::describe(Fetch& fetch, const Sequence& seq, const FetchPlan& plan) const {
  const int64_t full = plan.tokens / kPageTokens;
  const int64_t pages = (plan.tokens + kPageTokens - 1) / kPageTokens;
  fetch.tables.pages.assign(kv_.groups(), std::vector<int32_t>(pages, -1));
  fetch.tables.first_held = plan.first_held;
  fetch.parent = full == 0 ? seq.root : seq.keys[full - 1];
  fetch.tokens.assign(seq.tokens.begin() + full * kPageTokens, seq.tokens.begin() + plan.tokens);
  fetch.length = plan.tokens;
  fetch.loaded = plan.loaded;
  fetch.first_loaded = plan.first_loaded;
  fetch.slots.reserve(plan.pages.size());
}

PageLoad PageFetcher::make_load(const Sequence& seq, const PlannedPage& page, const FetchPlan& plan,
                                bool exact) const {
  PageLoad load;
  load.group = page.group;
  const int64_t begin = page.index * kPageTokens;
  const int64_t count = std::min<int64_t>(plan.tokens - begin, kPageTokens);
  load.full = count == kPageTokens;
  if (load.full) load.identity = kv_.identity(seq, page.index);
  load.move = std::make_shared<PageMove>();
  load.move->kind = PageMove::Kind::load;
  load.move->exact = exact;
  StoredPage& record = load.move->record;
  record.key = page.ref.key;
  record.parent = page.index == 0 ? seq.root : seq.keys[page.index - 1];
  record.group = page.group;
  record.fingerprint = model_.fingerprint();
  record.tokens.assign(seq.tokens.begin() + begin, seq.tokens.begin() + begin + count);
  load.tier = page.tier;
  load.bytes = page.ref.payload_bytes;
  return load;
}

PageFetcher::Fetches::iterator PageFetcher::find(const Sequence& seq) {
  return std::find_if(fetches_.begin(), fetches_.end(),
                      [&seq](const Fetch& fetch) { return fetch.seq == &seq; });
}

bool PageFetcher::active(const Sequence& seq) const {
  return std::any_of(fetches_.begin(), fetches_.end(),
                     [&seq](const Fetch& fetch) { return fetch.seq == &seq; });
}

void PageFetcher::wait_for(const Sequence& seq, Run& run) {
  find(seq)->run = &run;
  run.fetching = true;
}

void PageFetcher::cancel(const Sequence& seq) noexcept {
  const auto fetch = find(seq);
  if (fetch != fetches_.end()) drop(fetch);
}

void PageFetcher::forget(const PendingRemovals& removals) noexcept {
  const auto removed = [&removals](const Slot& slot) {
    if (!slot.load) return false;
    const StoredPage& page = slot.load->move->record;
    return removals.pending(page.key, page.parent, static_cast<int>(page.tokens.size()));
  };
  for (auto fetch = fetches_.begin(); fetch != fetches_.end();) {
    const auto next = std::next(fetch);
    if (std::any_of(fetch->slots.begin(), fetch->slots.end(), removed)) drop(fetch);
    fetch = next;
  }
}

void PageFetcher::cancel_late(Clock::time_point now) noexcept {
  for (auto fetch = fetches_.begin(); fetch != fetches_.end();) {
    const auto next = std::next(fetch);
    if (fetch->deadline <= now) drop(fetch);
    fetch = next;
  }
}

bool PageFetcher::cancel_idle() noexcept {
  const auto fetch = std::find_if(fetches_.begin(), fetches_.end(),
                                  [](const Fetch& f) { return f.run == nullptr; });
  if (fetch == fetches_.end()) return false;
  drop(fetch);
  return true;
}

bool PageFetcher::cancel_last() noexcept {
  if (cancel_idle()) return true;
  if (fetches_.empty()) return false;
  drop(std::max_element(fetches_.begin(), fetches_.end(), [](const Fetch& a, const Fetch& b) {
    return ranks_before(*a.run, *b.run);
  }));
  return true;
}

// Its run, if one waits, goes on without.
void PageFetcher::drop(Fetches::iterator fetch) noexcept {
  for (const Slot& slot : fetch->slots)
    if (slot.load && --slot.load->wanted == 0) drop_load(slot.load);
  kv_.release(fetch->tables, fetch->seq->retention_priority);
  if (fetch->run) fetch->run->fetching = false;
  fetches_.erase(fetch);
}

void PageFetcher::drop_load(PageLoad* load) noexcept {
  mover_.revoke(*load->move);
  load->move->owner = nullptr;
  kv_.pool(load->group).release(load->page, 0);
  loads_.remove_if([load](const PageLoad& l) { return &l == load; });
}

void PageFetcher::finish(PageMove& move) noexcept {
  auto* load = static_cast<PageLoad*>(move.owner);
  if (!load) return;  // nobody wants it any more
  ++(move.succeeded ? loaded_ : failed_);
  if (move.succeeded) {
    fill(*load, load->page);
  } else {
    for (auto fetch = fetches_.begin(); fetch != fetches_.end();) {
      const auto next = std::next(fetch);
      const auto wants = [load](const Slot& slot) { return slot.load == load; };
      if (std::any_of(fetch->slots.begin(), fetch->slots.end(), wants)) {
        if (fetch->run) plan_anew(*fetch->run);
        drop(fetch);
      }
      fetch = next;
    }  // the last one has dropped the load
  }
}

// Around the page that could not be loaded: pages that have come are on the device.
void PageFetcher::plan_anew(Run& run) noexcept {
  run.fetch_tried = ++run.failed_fetches > kMostFailures;
  run.gap_end = run.fetch_tried ? kNoToken : Run::kUnknown;
}

// The page is there.
void PageFetcher::fill(PageLoad& load, int32_t page) noexcept {
  PagePool& pool = kv_.pool(load.group);
  pool.set_foreign(page, load.move->foreign);
  if (load.full) {
    try {
      page = kv_.settle(load.group, page, load.identity, 0);
    } catch (const std::bad_alloc&) {  // then nobody else finds it
    }
  }
  load.move->owner = nullptr;
  bool first = true;
  for (auto fetch = fetches_.begin(); fetch != fetches_.end();) {
    const auto next = std::next(fetch);
    for (Slot& slot : fetch->slots) {
      if (slot.load != &load) continue;
      slot.load = nullptr;
      fetch->tables.pages[slot.group][slot.index] = page;
      if (!std::exchange(first, false)) pool.reference(page);
      --fetch->open;
    }
    if (fetch->open == 0) complete(fetch);
    fetch = next;
  }
  loads_.remove_if([&load](const PageLoad& l) { return &l == &load; });
}

void PageFetcher::complete(Fetches::iterator fetch) {
  Sequence& seq = *fetch->seq;
  Run* run = fetch->run;
  if (fits(*fetch)) {
    kv_.install(seq, std::move(fetch->tables), fetch->length);
    if (run) {
      run->loaded_tokens += fetch->loaded;
      run->first_loaded = std::min(run->first_loaded, fetch->first_loaded);
    }
  }
  drop(fetch);  // what was not taken over
}

// Meanwhile the sequence may have become another one, or may have got on by itself.
bool PageFetcher::fits(const Fetch& fetch) const {
  Sequence& seq = *fetch.seq;
  if (seq.length() < fetch.length || seq.written >= fetch.length) return false;
  const int64_t full = fetch.length / kPageTokens;
  const int64_t known = static_cast<int64_t>(seq.keys.size());
  BlockHash parent = known < full ? BlockHash{} : full == 0 ? seq.root : seq.keys[full - 1];
  if (known < full) {  // it was shortened, and grew again
    parent = known == 0 ? seq.root : seq.keys[known - 1];
    for (int64_t j = known; j < full; ++j)
      parent = next_key(parent, seq.tokens.data() + j * kPageTokens, kPageTokens);
  }
  return parent == fetch.parent && std::equal(fetch.tokens.begin(), fetch.tokens.end(),
                                              seq.tokens.begin() + full * kPageTokens);
}

void PageFetcher::add_loads(std::vector<TierLoad>& loads) const {
  for (const PageLoad& load : loads_) loads[load.tier].add(load.bytes);
}

void PageFetcher::add_held(std::vector<HeldPage>& held) const {
  for (const PageLoad& load : loads_) held.push_back({load.group, load.page});
  for (const Fetch& fetch : fetches_)
    for (size_t g = 0; g < fetch.tables.pages.size(); ++g)
      for (const int32_t page : fetch.tables.pages[g])
        if (page >= 0) held.push_back({static_cast<int>(g), page});
}

}  // namespace turbomind
