#include "cache/page_pool.h"

#include <algorithm>
#include <new>

#include "core/error.h"

namespace turbomind {

PagePool::PagePool(int64_t pages) : pages_(pages), free_(pages) {
  for (int64_t i = 0; i < pages; ++i) free_[i] = static_cast<int32_t>(pages - 1 - i);
}

int32_t PagePool::take() {
  if (free_.empty()) {
    if (cached_.empty()) return -1;
    evict(cached_.begin()->page);
  }
  const int32_t page = free_.back();
  free_.pop_back();
  pages_[page].references = 1;
  pages_[page].retention_priority = kOutOfReach;
  pages_[page].foreign = false;
  return page;
}

void PagePool::reference(int32_t page) {
  if (pages_[page].references == 0) uncache(page);
  ++pages_[page].references;
}

void PagePool::release(int32_t page, float retention_priority) {
  Page& p = pages_[page];
  p.retention_priority = std::max(p.retention_priority, retention_priority);
  if (--p.references > 0) return;
  p.last_use = ++clock_;
  if (p.sealed) {
    try {
      cached_.insert(cached_entry(page));
      out_of_reach_ += p.retention_priority == kOutOfReach;
      return;
    } catch (const std::bad_alloc&) {
      unseal(page);
    }
  }
  free_.push_back(page);  // the constructor reserved room for every page
}

PagePool::CachedPage PagePool::cached_entry(int32_t page) const {
  const Page& p = pages_[page];
  const double lifetime = static_cast<double>(kLifetime * total());
  const double worth = static_cast<double>(p.last_use) + lifetime * p.retention_priority;
  return {worth, p.last_use, page};
}

void PagePool::uncache(int32_t page) {
  cached_.erase(cached_entry(page));
  out_of_reach_ -= pages_[page].retention_priority == kOutOfReach;
}

bool PagePool::seal(int32_t page, const PageIdentity& identity) {
  if (!index_.insert(identity, page)) return false;
  pages_[page].sealed = true;
  pages_[page].key = identity.key;
  return true;
}

void PagePool::unseal(int32_t page) {
  index_.erase(pages_[page].key);
  pages_[page].sealed = false;
}

void PagePool::forget(int32_t page) {
  if (references(page) == 0) return evict(page);
  unseal(page);
}

void PagePool::forget(const BlockHash& key) {
  const int32_t page = index_.find(key);
  if (page >= 0) forget(page);
}

void PagePool::evict(int32_t page) {
  uncache(page);
  unseal(page);
  free_.push_back(page);
}

void PagePool::evict_all() {
  while (!cached_.empty()) evict(cached_.begin()->page);
}

void PagePool::check(const std::vector<int32_t>& expected) const {
  std::vector<int> state(pages_.size(), 0);
  for (int32_t page : free_) ++state[page];
  for (const CachedPage& c : cached_) ++state[c.page];
  int64_t sealed_pages = 0;
  for (size_t i = 0; i < pages_.size(); ++i) {
    const Page& p = pages_[i];
    sealed_pages += p.sealed;
    if (p.references != expected[i])
      throw_error(ErrorCode::internal, "page ", i, " counts ", p.references,
                  " references, sequences hold it ", expected[i], " times");
    if (state[i] + (p.references > 0) != 1)
      throw_error(ErrorCode::internal, "page ", i, " is in ", state[i] + (p.references > 0),
                  " of the states free, referenced and cached");
  }
  for (int32_t page : free_)
    if (pages_[page].sealed) throw_error(ErrorCode::internal, "free page ", page, " is sealed");
  int64_t out_of_reach = 0;
  for (const CachedPage& c : cached_) {
    if (!pages_[c.page].sealed || c != cached_entry(c.page))
      throw_error(ErrorCode::internal, "cached page ", c.page, " is not sealed or out of order");
    out_of_reach += pages_[c.page].retention_priority == kOutOfReach;
  }
  if (out_of_reach != out_of_reach_)
    throw_error(ErrorCode::internal, out_of_reach, " cached pages are out of reach, counted are ",
                out_of_reach_);
  if (sealed_pages != index_.size())
    throw_error(ErrorCode::internal, sealed_pages, " pages are sealed, ", index_.size(),
                " are in the index");
}

}  // namespace turbomind
