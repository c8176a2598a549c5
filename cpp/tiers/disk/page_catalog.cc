#include "tiers/disk/page_catalog.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "cache/kv_layout.h"

namespace turbomind {

bool CatalogPage::partial() const {
  return tokens.size() < size_t{kPageTokens};
}

bool PageCatalog::ByValue::operator()(const CatalogPage* a, const CatalogPage* b) const {
  return std::tie(a->retention_priority, a->last_use, a->segment, a->offset) <
         std::tie(b->retention_priority, b->last_use, b->segment, b->offset);
}

void PageCatalog::update_leaf(CatalogPage* page) {
  if (followed(page->key, page->group))
    leaves_.erase(page);
  else
    leaves_.insert(page);
}

void PageCatalog::update_parent(const CatalogPage& page) {
  if (CatalogPage* parent = find(page.parent, page.group)) update_leaf(parent);
}

CatalogPage* PageCatalog::insert(CatalogPage given) {
  auto owned = std::make_unique<CatalogPage>(std::move(given));
  CatalogPage* page = owned.get();
  pages_.emplace(page, std::move(owned));
  PageIndex::insert(page);
  update_leaf(page);
  update_parent(*page);
  return page;
}

void PageCatalog::erase(CatalogPage* page) {
  leaves_.erase(page);
  PageIndex::erase(page);
  update_parent(*page);
  pages_.erase(page);
}

void PageCatalog::set_use(CatalogPage* page, float retention_priority, int64_t last_use) {
  const bool leaf = leaves_.erase(page) > 0;
  page->retention_priority = retention_priority;
  page->last_use = last_use;
  page->unsaved = true;
  if (leaf) leaves_.insert(page);
}

CatalogPage* PageCatalog::least_valuable(const std::unordered_set<BlockHash>* except) const {
  const auto may_leave = [except](const CatalogPage* page) {
    return except == nullptr || !except->contains(page->key);
  };
  const auto it = std::find_if(leaves_.begin(), leaves_.end(), may_leave);
  return it == leaves_.end() ? nullptr : *it;
}

}  // namespace turbomind
