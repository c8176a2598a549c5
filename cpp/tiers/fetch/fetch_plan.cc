#include "tiers/fetch/fetch_plan.h"

#include <algorithm>
#include <tuple>

namespace turbomind {

FetchPlan FetchPlanner::plan(Sequence& seq, int64_t most, bool exact) {
  FetchPlan plan;
  plan.tokens = seq.written;
  plan.loads.resize(tiers_.size());
  const int64_t searched = find_full(seq, most, exact);
  if ((searched + 1) * kPageTokens <= most) plan.missing = searched;
  const int64_t partial_end = find_partial(seq, searched, most, exact);
  const int64_t tokens = std::max(usable_ * kPageTokens, partial_end);
  if (tokens <= seq.written) return plan;
  plan.tokens = tokens;
  fill_plan(seq, plan, tokens == partial_end);
  return plan;
}

int64_t FetchPlanner::find_full(Sequence& seq, int64_t most, bool exact) {
  const size_t groups = kv_.groups();
  first_ = seq.written / kPageTokens;
  usable_ = 0;
  found_.assign(groups, {});
  consecutive_.resize(groups);
  for (size_t g = 0; g < groups; ++g)
    consecutive_[g] = first_ - std::min(first_, seq.first_held[g]);
  int64_t page = first_;
  for (; (page + 1) * kPageTokens <= most; ++page) {
    kv_.extend_keys(seq, page + 1);
    if (!find_page(seq, page, exact)) break;
    if (in_reach(page + 1, (page + 1) * kPageTokens)) usable_ = page + 1;
  }
  return page;
}

// Returns false when a group that needs every page lacks this one.
bool FetchPlanner::find_page(Sequence& seq, int64_t page, bool exact) {
  const PageIdentity identity = kv_.identity(seq, page);
  std::vector<PlannedPage> pages;
  for (size_t g = 0; g < kv_.groups(); ++g) {
    pages.push_back(locate(static_cast<int>(g), identity, exact));
    pages.back().index = page;
    if (!pages.back().found() && kv_.group(static_cast<int>(g)).kind != CacheKind::window)
      return false;
  }
  for (size_t g = 0; g < kv_.groups(); ++g) {
    consecutive_[g] = pages[g].found() ? consecutive_[g] + 1 : 0;
    found_[g].push_back(std::move(pages[g]));
  }
  return true;
}

FoundRange FetchPlanner::next_range(Sequence& seq, int64_t page, int64_t most, bool exact) {
  FoundRange range;
  range.loads.resize(tiers_.size());
  const int64_t pages = most / kPageTokens;
  while (page < pages && !add_page(seq, page, exact, range.loads)) ++page;
  range.begin = page;
  while (page < pages && (page == range.begin || add_page(seq, page, exact, range.loads))) ++page;
  range.end = page;
  return range;
}

// Returns false when the page is missing in a group that needs every page.
bool FetchPlanner::add_page(Sequence& seq, int64_t page, bool exact, std::vector<TierLoad>& loads) {
  kv_.extend_keys(seq, page + 1);
  const PageIdentity identity = kv_.identity(seq, page);
  std::vector<PlannedPage> pages;
  for (size_t g = 0; g < kv_.groups(); ++g) {
    const int group = static_cast<int>(g);
    if (kv_.group(group).kind == CacheKind::window) continue;
    if (!pages.emplace_back(locate(group, identity, exact)).found()) return false;
  }
  for (const PlannedPage& at : pages)
    if (at.in_tier()) loads[at.tier].add(at.ref.payload_bytes);
  return !pages.empty();
}

PlannedPage FetchPlanner::locate(int group, const PageIdentity& identity, bool exact) {
  PlannedPage at;
  at.group = group;
  const PagePool& pool = kv_.pool(group);
  at.device = pool.find(identity);
  if (at.device >= 0 && exact && pool.foreign(at.device)) at.device = -1;
  if (at.device >= 0) return at;
  at.load = loads_.find(group, identity, exact);
  if (at.load) return at;
  if (removals_.pending(identity.key)) return at;
  for (size_t i = 0; i < tiers_.size(); ++i) {
    const auto ref = tiers_[i]->find(identity.key, group);
    if (!ref || ref->count != kPageTokens || (exact && ref->foreign)) continue;
    at.ref = *ref;
    at.tier = i;
    return at;
  }
  return at;
}

// Returns the number of tokens up to the end of the partial page that every group has; 0: none has.
int64_t FetchPlanner::find_partial(Sequence& seq, int64_t page, int64_t most, bool exact) {
  const int64_t begin = page * kPageTokens;
  const int wanted = static_cast<int>(std::min<int64_t>(most - begin, kPageTokens - 1));
  partial_.assign(kv_.groups(), {});
  if (wanted <= 0) return 0;
  kv_.extend_keys(seq, page);
  const BlockHash& parent = page == 0 ? seq.root : seq.keys[page - 1];
  int shared = wanted;
  for (size_t g = 0; g < kv_.groups(); ++g) {
    int best = 0;
    for (size_t i = 0; i < tiers_.size(); ++i) {
      int count = 0;
      const auto ref = tiers_[i]->find_prefix(parent, static_cast<int>(g),
                                              seq.tokens.data() + begin, wanted, &count);
      if (!ref || count <= best || (exact && ref->foreign)) continue;
      if (removals_.pending(ref->key, parent, ref->count)) continue;
      best = count;
      partial_[g].group = static_cast<int>(g);
      partial_[g].index = page;
      partial_[g].ref = *ref;
      partial_[g].tier = i;
    }
    shared = std::min(shared, best);
  }
  return shared > 0 && in_reach(page, begin + shared) ? begin + shared : 0;
}

// Returns whether the consecutive pages before `page` include all that a query at token `tokens`
// sees.
bool FetchPlanner::in_reach(int64_t page, int64_t tokens) const {
  for (size_t g = 0; g < consecutive_.size(); ++g)
    if (consecutive_[g] < page - kv_.first_reachable(static_cast<int>(g), tokens)) return false;
  return true;
}

void FetchPlanner::fill_plan(const Sequence& seq, FetchPlan& plan, bool partial) {
  const int64_t full = plan.tokens / kPageTokens;
  plan.first_loaded = plan.tokens;
  int64_t loaded_page = -1;  // the last one counted
  std::vector<int64_t> loaded;
  int64_t in_reach = plan.tokens;
  for (size_t g = 0; g < kv_.groups(); ++g) {
    const int group = static_cast<int>(g);
    plan.first_held.push_back(kv_.first_reachable(group, plan.tokens));
    in_reach = std::min(in_reach, plan.first_held[g]);
    for (int64_t j = plan.first_held[g]; j < full + partial; ++j) {
      PlannedPage& at = plan.pages.emplace_back();
      if (j < first_) {
        at.group = group;
        at.index = j;
        at.device = seq.pages[g][j];
        continue;
      }
      at = j < full ? found_[g][j - first_] : partial_[g];
      if (at.in_tier()) plan.loads[at.tier].add(at.ref.payload_bytes);
      if (at.device < 0) loaded.push_back(j);
    }
  }
  // Pages that no query sees any more count as loaded.
  for (int64_t j = first_; j < in_reach && !loaded.empty(); ++j) loaded.push_back(j);
  std::sort(plan.pages.begin(), plan.pages.end(), [](const PlannedPage& a, const PlannedPage& b) {
    return std::tie(a.index, a.group) < std::tie(b.index, b.group);
  });
  std::sort(loaded.begin(), loaded.end());
  for (const int64_t j : loaded) {
    if (j == loaded_page) continue;
    plan.first_loaded = std::min(plan.first_loaded, j * kPageTokens);
    plan.loaded += std::min((j + 1) * kPageTokens, plan.tokens) - j * kPageTokens;
    loaded_page = j;
  }
}

}  // namespace turbomind
