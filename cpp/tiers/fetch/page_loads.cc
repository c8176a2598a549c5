#include "tiers/fetch/page_loads.h"

#include <utility>

namespace turbomind {

PageLoad* PageLoads::find(int group, const PageIdentity& identity, bool exact) const {
  const auto [first, last] = index_.equal_range(identity.key);
  for (auto it = first; it != last; ++it) {
    PageLoad* load = it->second;
    if (load->group == group && load->move->exact == exact && load->identity == identity)
      return load;
  }
  return nullptr;
}

PageLoads::Index PageLoads::prepare(List& fresh) {
  Index index;
  index.reserve(fresh.size());
  for (auto load = fresh.begin(); load != fresh.end(); ++load) {
    load->self = load;
    if (load->full) index.emplace(load->identity.key, &*load);
  }
  index_.reserve(index_.size() + index.size());
  return index;
}

void PageLoads::add(List&& fresh, Index&& index) noexcept {
  for (const PageLoad& load : fresh) totals_[load.tier].add(load.bytes);
  loads_.splice(loads_.end(), fresh);
  index_.merge(index);
}

void PageLoads::erase(PageLoad& load) noexcept {
  const auto [first, last] = index_.equal_range(load.identity.key);
  for (auto it = first; it != last; ++it) {
    if (it->second != &load) continue;
    index_.erase(it);
    break;
  }
  --totals_[load.tier].pages;
  totals_[load.tier].bytes -= load.bytes;
  loads_.erase(load.self);
}

}  // namespace turbomind
