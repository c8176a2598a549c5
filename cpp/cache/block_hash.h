// The name of a page's contents: a 128-bit hash of its tokens and of everything before them.
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

// SipHash-2-4 with a 128-bit result (Aumasson and Bernstein, 2012).
BlockHash siphash128(const BlockHash& key, const void* data, size_t bytes);

// Parent of a sequence's first page. Sequences share pages only under equal roots.
BlockHash root_key(const std::string& fingerprint, int adapter, const std::string& salt);

// Key of the page that holds `tokens` behind the page named `parent`.
BlockHash next_key(const BlockHash& parent, const int32_t* tokens, int count);

}  // namespace turbomind

template <>
struct std::hash<turbomind::BlockHash> {
  size_t operator()(const turbomind::BlockHash& key) const noexcept { return key.lo; }
};
