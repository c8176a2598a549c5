#include "cache/page_catalog.h"

#include <algorithm>
#include <tuple>

#include "cache/kv_layout.h"

namespace turbomind {

namespace {

int shared_beginning(const std::vector<int32_t>& a, const int32_t* b, int count) {
  const int limit = std::min(static_cast<int>(a.size()), count);
  int n = 0;
  while (n < limit && a[n] == b[n]) ++n;
  return n;
}

}  // namespace

bool CatalogPage::partial() const {
  return tokens.size() < size_t{kPageTokens};
}

PageCatalog::Probe PageCatalog::ByTokens::probe(const CatalogPage* page) {
  return {page->group, page->tokens.data(), static_cast<int>(page->tokens.size())};
}

bool PageCatalog::ByTokens::less(const Probe& a, const Probe& b) {
  if (a.group != b.group) return a.group < b.group;
  return std::lexicographical_compare(a.tokens, a.tokens + a.count, b.tokens, b.tokens + b.count);
}

bool PageCatalog::ByValue::operator()(const CatalogPage* a, const CatalogPage* b) const {
  return std::tie(a->keep_value, a->last_use, a->segment, a->offset) <
         std::tie(b->keep_value, b->last_use, b->segment, b->offset);
}

CatalogPage* PageCatalog::find(const ChainKey& key, int group) {
  const auto [first, last] = pages_.equal_range(key);
  const auto it =
      std::find_if(first, last, [&](const auto& item) { return item.second.group == group; });
  return it != last ? &it->second : nullptr;
}

std::vector<CatalogPage*> PageCatalog::find_all(const ChainKey& key) {
  std::vector<CatalogPage*> found;
  const auto [first, last] = pages_.equal_range(key);
  for (auto it = first; it != last; ++it) found.push_back(&it->second);
  return found;
}

CatalogPage* PageCatalog::find_beginning(const ChainKey& parent, int group, const int32_t* tokens,
                                         int count, int* shared) {
  *shared = 0;
  const auto family = children_.find(parent);
  if (family == children_.end()) return nullptr;
  // In the order of tokens the longest common beginning is that of a neighbour.
  const Children& pages = family->second;
  const auto after = pages.lower_bound(Probe{group, tokens, count});
  CatalogPage* best = nullptr;
  const auto consider = [&](CatalogPage* page) {
    const int n = page->group == group ? shared_beginning(page->tokens, tokens, count) : 0;
    if (n > *shared || (best != nullptr && n == *shared && best->foreign && !page->foreign)) {
      best = page;
      *shared = n;
    }
  };
  if (after != pages.end()) consider(*after);
  if (after != pages.begin()) consider(*std::prev(after));
  return best;
}

std::vector<CatalogPage*> PageCatalog::partial_children(const ChainKey& parent) {
  std::vector<CatalogPage*> found;
  const auto family = children_.find(parent);
  if (family == children_.end()) return found;
  for (CatalogPage* page : family->second) {
    if (page->partial()) found.push_back(page);
  }
  return found;
}

CatalogPage* PageCatalog::find_partial_beginning(const CatalogPage& page) {
  const auto family = children_.find(page.parent);
  if (family == children_.end()) return nullptr;
  const auto at = family->second.lower_bound(ByTokens::probe(&page));
  if (at == family->second.begin()) return nullptr;
  CatalogPage* before = *std::prev(at);
  const size_t size = before->tokens.size();
  const bool beginning =
      before->group == page.group && size < page.tokens.size() &&
      std::equal(before->tokens.begin(), before->tokens.end(), page.tokens.begin());
  return beginning ? before : nullptr;
}

bool PageCatalog::has_children(const CatalogPage& page) const {
  const auto family = children_.find(page.key);
  if (family == children_.end()) return false;
  const auto first = family->second.lower_bound(Probe{page.group, nullptr, 0});
  return first != family->second.end() && (*first)->group == page.group;
}

void PageCatalog::update_leaf(CatalogPage* page) {
  if (has_children(*page))
    leaves_.erase(page);
  else
    leaves_.insert(page);
}

CatalogPage* PageCatalog::insert(CatalogPage given) {
  CatalogPage* page = &pages_.emplace(given.key, std::move(given))->second;
  children_[page->parent].insert(page);
  update_leaf(page);
  if (CatalogPage* parent = find(page->parent, page->group)) update_leaf(parent);
  return page;
}

void PageCatalog::erase(CatalogPage* page) {
  leaves_.erase(page);
  const auto family = children_.find(page->parent);
  if (family != children_.end()) {
    family->second.erase(page);
    if (family->second.empty()) children_.erase(family);
  }
  if (CatalogPage* parent = find(page->parent, page->group)) update_leaf(parent);
  const auto [first, last] = pages_.equal_range(page->key);
  pages_.erase(std::find_if(first, last, [&](const auto& item) { return &item.second == page; }));
}

void PageCatalog::set_use(CatalogPage* page, float keep_value, int64_t last_use) {
  const bool leaf = leaves_.erase(page) > 0;
  page->keep_value = keep_value;
  page->last_use = last_use;
  page->unsaved = true;
  if (leaf) leaves_.insert(page);
}

CatalogPage* PageCatalog::least_valuable() {
  return leaves_.empty() ? nullptr : *leaves_.begin();
}

}  // namespace turbomind
