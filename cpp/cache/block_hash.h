// Block hashes: a chained 128-bit hash of a page's tokens and of everything before them (vLLM:
// block hash), the key of prefix caching on the device and in every lower tier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace turbomind {

struct BlockHash {
  uint64_t lo = 0;
  uint64_t hi = 0;
  bool operator==(const BlockHash&) const = default;
};

// Returns SipHash-2-4 with a 128-bit result (Aumasson and Bernstein, 2012).
BlockHash siphash128(const BlockHash& key, const void* data, size_t bytes);

// Returns the parent hash of a sequence's first page. Only sequences with equal roots share pages.
// `fingerprint`: of the model's weights. `salt`: of the owner, who shares pages only with himself.
BlockHash root_key(const std::string& fingerprint, int adapter, const std::string& salt);

// Returns the hash of the page that holds `tokens` [count], after the page `parent`.
BlockHash next_key(const BlockHash& parent, const int32_t* tokens, int count);

}  // namespace turbomind

template <>
struct std::hash<turbomind::BlockHash> {
  size_t operator()(const turbomind::BlockHash& key) const noexcept { return key.lo; }
};
