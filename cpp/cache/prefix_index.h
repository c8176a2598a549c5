// Finds the sealed page of one cache group by block hash.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>

#include "cache/block_hash.h"
#include "cache/kv_layout.h"

namespace turbomind {

// What a sealed page says about itself. A hit needs all of it to agree, not the hash alone.
struct PageIdentity {
  BlockHash key;
  BlockHash parent;
  std::array<int32_t, kPageTokens> tokens{};
  bool operator==(const PageIdentity&) const = default;
};

class PrefixIndex {
 public:
  // The page with this identity, or -1.
  int32_t find(const PageIdentity& identity) const;
  int32_t find(const BlockHash& key) const;  // whatever its tokens are
  // False when the key is taken (by this page or by another one's).
  bool insert(const PageIdentity& identity, int32_t page);
  void erase(const BlockHash& key) { entries_.erase(key); }
  int64_t size() const { return static_cast<int64_t>(entries_.size()); }

 private:
  struct Entry {
    int32_t page;
    PageIdentity identity;
  };
  std::unordered_map<BlockHash, Entry> entries_;
};

}  // namespace turbomind
