// The memory of pages as the KV cache sees it. A model owns that memory (engine/page_memory_of.h
// connects the two), so that cache/ does not depend on model/.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cache/kv_layout.h"

namespace turbomind {

struct PageMemory {
  std::string fingerprint;                      // of the model; seeds block hashes
  std::vector<CacheGroup> groups;               // layers that share a page table
  std::function<void(int64_t pages)> allocate;  // for every group; called once, by KvCache
  // Copies the whole page `from` of a group over its page `to`.
  std::function<void(int group, int32_t from, int32_t to)> copy;
};

}  // namespace turbomind
