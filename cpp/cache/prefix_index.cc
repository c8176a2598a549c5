#include "cache/prefix_index.h"

namespace turbomind {

int32_t PrefixIndex::find(const PageIdentity& identity) const {
  const auto it = entries_.find(identity.key);
  return it != entries_.end() && it->second.identity == identity ? it->second.page : -1;
}

int32_t PrefixIndex::find(const BlockHash& key) const {
  const auto it = entries_.find(key);
  return it != entries_.end() ? it->second.page : -1;
}

bool PrefixIndex::insert(const PageIdentity& identity, int32_t page) {
  return entries_.try_emplace(identity.key, Entry{page, identity}).second;
}

}  // namespace turbomind
