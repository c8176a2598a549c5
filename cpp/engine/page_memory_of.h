// The page memory of a model, for the KV cache.
#pragma once

#include "cache/kv_cache.h"
#include "model/model.h"

namespace turbomind {

// Returns the memory and its functions, which refer to `model`; the model must outlive them.
inline PageMemory page_memory_of(Model& model) {
  PageMemory memory;
  memory.fingerprint = model.fingerprint();
  memory.groups = model.groups();
  memory.allocate = [&model](const std::vector<int64_t>& pages) {
    model.pages().allocate_pages(pages);
  };
  memory.copy = [&model](int group, int32_t from, int32_t to) {
    model.pages().copy_page(group, from, to);
  };
  return memory;
}

}  // namespace turbomind
