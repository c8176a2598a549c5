// Prefix index (vLLM: cached block hash to block): finds the sealed page of one cache group by
// block hash.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>

#include "cache/block_hash.h"
#include "cache/kv_layout.h"

namespace turbomind {

// Identity of a sealed page. A hit requires all of it to be equal, not the hash alone.
struct PageIdentity {
  BlockHash key;
  BlockHash parent;
  std::array<int32_t, kPageTokens> tokens{};
  bool operator==(const PageIdentity&) const = default;
};

class PrefixIndex {
 public:
  // Returns the page with this identity, or -1.
  int32_t find(const PageIdentity& identity) const;
  // Returns the page with this hash, whatever its tokens are, or -1.
  int32_t find(const BlockHash& key) const;
  // Returns false when the hash is taken, by this page or another one.
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
