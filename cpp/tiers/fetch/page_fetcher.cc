#include "tiers/fetch/page_fetcher.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "model/model.h"

namespace turbomind {

namespace {

// A fetch that takes longer than computing by this factor is cancelled, though not before:
constexpr double kPatience = 3;
constexpr double kLeastPatience = 2, kMostPatience = 3600;  // seconds

}  // namespace

PageFetcher::PageFetcher(KvCache& kv, const Model& model, PageMover& mover,
                         const PendingRemovals& removals,
                         const std::vector<ReadSpeed>& first_speeds)
    : kv_(kv),
      model_(model),
      mover_(mover),
      removals_(removals),
      cost_(first_speeds),
      loads_(mover.tiers().size()) {}

FetchState* PageFetcher::add(const FetchClient& client) {
  return &states_.emplace_back(client);
}

void PageFetcher::remove(FetchState* state) noexcept {
  drop_if([state](const Fetch& fetch) { return fetch.waiter == state; });
  states_.remove_if([state](const FetchState& other) { return &other == state; });
}

FetchPlanner PageFetcher::planner(size_t tiers) {
  return FetchPlanner(kv_, mover_.tiers(), removals_, loads_, tiers);
}

FetchPlan PageFetcher::plan(Sequence& seq, int64_t most, bool exact) {
  return planner(mover_.tiers().size()).plan(seq, most, exact);
}

// Returns whether to load the plan's pages rather than to compute from the token `from` on.
bool PageFetcher::worth(const FetchPlan& plan, int64_t from, const ComputeCost& compute) const {
  if (plan.loaded == 0) return false;
  std::vector<TierLoad> loads = plan.loads;
  for (size_t i = 0; i < loads.size(); ++i) {  // on their way already
    loads[i].pages += loads_.totals()[i].pages;
    loads[i].bytes += loads_.totals()[i].bytes;
  }
  return cost_.worth(loads, compute.seconds(from, plan.tokens));
}

FetchResult PageFetcher::fetch(FetchState& state, int64_t reusable, const ComputeCost& compute,
                               const std::vector<int64_t>& promised,
                               const std::function<bool()>& make_room) {
  Sequence& seq = *state.client_.seq;
  const bool exact = state.client_.exact;
  if (const auto active = find(seq); active != fetches_.end()) {
    active->waiter = &state;
    state.fetching_ = true;
    return FetchResult::waiting;
  }
  if (state.tried_) return FetchResult::none;
  FetchPlan next = plan(seq, reusable, exact);
  if (!state.hole_known_ && state.client_.crosses_holes)
    state.set_hole_end(find_hole_end(seq, next.missing, reusable, exact, compute));
  if (!worth(next, seq.written, compute)) return FetchResult::none;
  while (!has_room(next, promised)) {
    const uint64_t drops = drops_;
    if (!make_room()) return FetchResult::no_room;
    if (drops_ == drops) continue;
    next = plan(seq, reusable, exact);  // it may have used a load that was dropped
    if (!worth(next, seq.written, compute)) return FetchResult::none;
  }
  begin(seq, &state, next, exact, compute.seconds(seq.written, next.tokens));
  state.tried_ = true;
  return FetchResult::waiting;
}

void PageFetcher::prefetch(Sequence& seq, const ComputeCost& compute,
                           const std::vector<int64_t>& promised) {
  if (find(seq) != fetches_.end()) return;
  kv_.resume(seq, seq.length());
  const FetchPlan next = plan(seq, seq.length(), false);
  if (!worth(next, seq.written, compute) || !has_room(next, promised)) return;
  begin(seq, nullptr, next, false, compute.seconds(seq.written, next.tokens));
}

// Returns the first token after the page `missing` from which on loading is worth it.
int64_t PageFetcher::find_hole_end(Sequence& seq, int64_t missing, int64_t most, bool exact,
                                   const ComputeCost& compute) {
  if (missing == kNoToken) return kNoToken;
  FetchPlanner planner = this->planner(mover_.tiers().size());
  for (int64_t page = missing + 1;;) {
    const FoundRange range = planner.next_range(seq, page, most, exact);
    if (range.begin == range.end) return kNoToken;
    const int64_t begin = range.begin * kPageTokens, end = range.end * kPageTokens;
    if (cost_.worth(range.loads, compute.seconds(begin, end))) return begin;
    page = range.end;
  }
}

int64_t PageFetcher::longest_prefix(Sequence& seq, size_t tiers) {
  return planner(tiers).plan(seq, seq.length(), false).tokens;
}

double PageFetcher::predict_ttft(Sequence& seq, int64_t device, int64_t added,
                                 const ComputeCost& compute) {
  const int64_t length = seq.length() + added;
  const FetchPlan next = plan(seq, seq.length(), false);
  const bool load = next.tokens > device && worth(next, device, compute);
  const int64_t from = std::min(load ? next.tokens : device, length - 1);
  const double loading = load ? cost_.load_seconds(next.loads) : 0;
  return loading + compute.seconds(from, length);
}

// Returns whether free and cached pages suffice, `promised` ones per group left aside.
bool PageFetcher::has_room(const FetchPlan& plan, const std::vector<int64_t>& promised) const {
  std::vector<int64_t> needed = promised;
  for (const PlannedPage& at : plan.pages) {
    if (at.load) continue;
    const PagePool& pool = kv_.pool(at.group);
    needed[at.group] += at.in_tier() || pool.references(at.device) == 0;
  }
  for (size_t g = 0; g < needed.size(); ++g)
    if (needed[g] > kv_.pool(static_cast<int>(g)).available()) return false;
  return true;
}

// Only with room. `waiter`: null when no request waits for it.
void PageFetcher::begin(Sequence& seq, FetchState* waiter, const FetchPlan& plan, bool exact,
                        double compute_seconds) {
  const std::chrono::duration<double> patience(
      std::clamp(kPatience * compute_seconds, kLeastPatience, kMostPatience));
  // Everything that may throw is done before any state changes.
  Fetches fetches(1);
  Fetch& fetch = fetches.front();
  fetch.seq = &seq;
  fetch.waiter = waiter;
  fetch.deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(patience);
  describe(fetch, seq, plan);
  fetch.self = fetches.begin();
  PageLoads::List fresh;
  PageMover::Moves moves;
  for (const PlannedPage& at : plan.pages) {
    PageLoad* load = at.load;
    if (at.in_tier()) {
      load = &fresh.emplace_back(make_load(seq, at, plan, exact));
      load->move->owner = load;
      moves.push_back(load->move);
    }
    if (!load) continue;
    load->waiters.reserve(load->waiters.size() + 1);
    fetch.places.push_back({at.group, at.index, load});
  }
  PageLoads::Index index = loads_.prepare(fresh);
  // Nothing after this line throws. Pages on the device are referenced first, so that take() below
  // does not evict them.
  for (const PlannedPage& at : plan.pages) {
    if (at.device < 0) continue;
    kv_.pool(at.group).reference(at.device);
    fetch.tables.pages[at.group][at.index] = at.device;
  }
  for (PageLoad& load : fresh) load.move->page = load.page = kv_.pool(load.group).take();
  fetch.open = fetch.places.size();
  for (size_t i = 0; i < fetch.open; ++i) fetch.places[i].load->waiters.push_back({&fetch, i});
  loads_.add(std::move(fresh), std::move(index));
  fetches_.splice(fetches_.end(), fetches);
  mover_.post(std::move(moves));
  if (waiter) waiter->fetching_ = true;
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
  fetch.places.reserve(plan.pages.size());
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

bool PageFetcher::fetching(const Sequence& seq) const {
  return std::any_of(fetches_.begin(), fetches_.end(),
                     [&seq](const Fetch& fetch) { return fetch.seq == &seq; });
}

void PageFetcher::cancel(const Sequence& seq) noexcept {
  const auto fetch = find(seq);
  if (fetch != fetches_.end()) drop(fetch);
}

void PageFetcher::forget(const PendingRemovals& removals) noexcept {
  const auto removed = [&removals](const Fetch::Place& place) {
    if (!place.load) return false;
    const StoredPage& page = place.load->move->record;
    return removals.pending(page.key, page.parent, static_cast<int>(page.tokens.size()));
  };
  drop_if([&removed](const Fetch& fetch) {
    return std::any_of(fetch.places.begin(), fetch.places.end(), removed);
  });
}

void PageFetcher::cancel_late() noexcept {
  drop_if([now = Clock::now()](const Fetch& fetch) { return fetch.deadline <= now; });
}

bool PageFetcher::cancel_idle() noexcept {
  const auto fetch = std::find_if(fetches_.begin(), fetches_.end(),
                                  [](const Fetch& f) { return f.waiter == nullptr; });
  if (fetch == fetches_.end()) return false;
  drop(fetch);
  return true;
}

bool PageFetcher::cancel_last() noexcept {
  if (cancel_idle()) return true;
  if (fetches_.empty()) return false;
  drop(std::max_element(fetches_.begin(), fetches_.end(), [](const Fetch& a, const Fetch& b) {
    return a.waiter->rank() < b.waiter->rank();
  }));
  return true;
}

template <typename F>
void PageFetcher::drop_if(F&& condition) noexcept {
  for (auto fetch = fetches_.begin(); fetch != fetches_.end();) {
    const auto next = std::next(fetch);
    if (condition(*fetch)) drop(fetch);
    fetch = next;
  }
}

// A sequence that waits for it goes on without it.
void PageFetcher::drop(Fetches::iterator fetch) noexcept {
  ++drops_;
  for (const Fetch::Place& place : fetch->places) {
    if (!place.load) continue;
    std::erase_if(place.load->waiters,
                  [&fetch](const PageLoad::Waiter& waiter) { return waiter.fetch == &*fetch; });
    if (place.load->waiters.empty()) drop_load(*place.load);
  }
  kv_.release(fetch->tables, fetch->seq->retention_priority);
  if (fetch->waiter) fetch->waiter->fetching_ = false;
  fetches_.erase(fetch);
}

void PageFetcher::drop_load(PageLoad& load) noexcept {
  mover_.revoke(*load.move);
  load.move->owner = nullptr;
  kv_.pool(load.group).release(load.page, 0);
  loads_.erase(load);
}

void PageFetcher::finish(PageMove& move) noexcept {
  if (move.succeeded) cost_.observe(move.tier, move.bytes, move.seconds);
  auto* load = static_cast<PageLoad*>(move.owner);
  if (!load) return;  // every fetch that wanted it was cancelled
  ++(move.succeeded ? loaded_ : failed_);
  if (move.succeeded) return fill(*load, load->page);
  // Dropping the last fetch that waits for the load drops the load too.
  for (size_t left = load->waiters.size(); left-- > 0;) {
    Fetch& fetch = *load->waiters.back().fetch;
    if (fetch.waiter) plan_again(*fetch.waiter);
    drop(fetch.self);
  }
}

// A new plan goes around the page that could not be loaded; pages that have come are on the device.
void PageFetcher::plan_again(FetchState& state) noexcept {
  state.tried_ = ++state.failures_ > kMostFailures;
  state.hole_known_ = state.tried_;
  state.hole_end_ = kNoToken;
}

// Puts the loaded page where fetches wait for it.
void PageFetcher::fill(PageLoad& load, int32_t page) noexcept {
  PagePool& pool = kv_.pool(load.group);
  pool.set_foreign(page, load.move->foreign);
  if (load.full) {
    try {
      page = kv_.settle(load.group, page, load.identity, 0);
    } catch (const std::bad_alloc&) {  // the page stays unsealed: other sequences do not find it
    }
  }
  load.move->owner = nullptr;
  bool first = true;
  for (const PageLoad::Waiter& waiter : std::exchange(load.waiters, {})) {
    Fetch& fetch = *waiter.fetch;
    Fetch::Place& place = fetch.places[waiter.place];
    place.load = nullptr;
    fetch.tables.pages[place.group][place.index] = page;
    if (!std::exchange(first, false)) pool.reference(page);
    if (--fetch.open == 0) complete(fetch.self);
  }
  loads_.erase(load);
}

void PageFetcher::complete(Fetches::iterator fetch) {
  Sequence& seq = *fetch->seq;
  if (fits(*fetch)) {
    kv_.install(seq, std::move(fetch->tables), fetch->length);
    if (FetchState* waiter = fetch->waiter) {
      waiter->loaded_tokens_ += fetch->loaded;
      waiter->first_loaded_ = std::min(waiter->first_loaded_, fetch->first_loaded);
    }
  }
  drop(fetch);  // releases pages that were not installed
}

// Returns whether the pages still belong to the sequence, which may have been truncated and
// extended meanwhile, and still help it, which may have computed more by itself.
bool PageFetcher::fits(const Fetch& fetch) const {
  Sequence& seq = *fetch.seq;
  if (seq.length() < fetch.length || seq.written >= fetch.length) return false;
  const int64_t full = fetch.length / kPageTokens;
  const int64_t known = static_cast<int64_t>(seq.keys.size());
  BlockHash parent = known < full ? BlockHash{} : full == 0 ? seq.root : seq.keys[full - 1];
  if (known < full) {  // it was truncated and has grown again
    parent = known == 0 ? seq.root : seq.keys[known - 1];
    for (int64_t j = known; j < full; ++j)
      parent = next_key(parent, seq.tokens.data() + j * kPageTokens, kPageTokens);
  }
  return parent == fetch.parent && std::equal(fetch.tokens.begin(), fetch.tokens.end(),
                                              seq.tokens.begin() + full * kPageTokens);
}

void PageFetcher::add_held(std::vector<HeldPage>& held) const {
  for (const PageLoad& load : loads_) held.push_back({load.group, load.page});
  for (const Fetch& fetch : fetches_)
    for (size_t g = 0; g < fetch.tables.pages.size(); ++g)
      for (const int32_t page : fetch.tables.pages[g])
        if (page >= 0) held.push_back({static_cast<int>(g), page});
}

}  // namespace turbomind
