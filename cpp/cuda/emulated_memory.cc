#include "cuda/emulated_memory.h"

#include <algorithm>
#include <cstring>

namespace turbomind::emulator {

namespace {

uintptr_t unit_of(const void* p) {
  return reinterpret_cast<uintptr_t>(p) / 16;
}

AccessBytes access(const void* p, const void* from, size_t bytes) {
  AccessBytes data{static_cast<uint8_t*>(const_cast<void*>(p)), static_cast<uint8_t>(bytes), {}};
  std::memcpy(data.bytes.data(), from, bytes);
  return data;
}

// Copies the part of `data` that lies in the range into it.
void overlay(uint8_t* to, const uint8_t* begin, size_t bytes, const AccessBytes& data) {
  const uint8_t* from = std::max<const uint8_t*>(begin, data.at);
  const uint8_t* end = std::min<const uint8_t*>(begin + bytes, data.at + data.count);
  if (from < end)
    std::memcpy(to + (from - begin), data.bytes.data() + (from - data.at), end - from);
}

}  // namespace

void DeviceMemory::load(const BlockView& view, void* to, const void* p, size_t bytes) const {
  uint8_t* const out = static_cast<uint8_t*>(to);
  const uint8_t* const begin = static_cast<const uint8_t*>(p);
  std::memcpy(out, begin, bytes);
  if (const auto found = changes_.find(unit_of(p)); found != changes_.end()) {
    const auto own = view.seen.find(unit_of(p));
    const uint64_t seen = std::max(view.fenced, own == view.seen.end() ? 0 : own->second);
    const std::vector<Change>& changes = found->second;
    for (auto change = changes.rbegin(); change != changes.rend() && change->time > seen; ++change)
      overlay(out, begin, bytes, change->before);
  }
  if (const auto found = view.stores.find(unit_of(p)); found != view.stores.end())
    for (const BlockView::Store& store : found->second) overlay(out, begin, bytes, store.data);
}

void DeviceMemory::store(BlockView& view, int warp, int phase, void* p, const void* from,
                         size_t bytes) {
  view.stores[unit_of(p)].push_back({access(p, from, bytes), warp, phase});
}

void DeviceMemory::fence(BlockView& view, int warp, int phase) {
  for (auto unit = view.stores.begin(); unit != view.stores.end();) {
    std::vector<BlockView::Store> later;
    for (const BlockView::Store& store : unit->second) {
      if (store.warp == warp || store.phase < phase)
        write(store.data);
      else
        later.push_back(store);
    }
    unit->second = std::move(later);
    unit = unit->second.empty() ? view.stores.erase(unit) : std::next(unit);
  }
  view.fenced = now_;
}

uint64_t DeviceMemory::add(BlockView& view, void* p, uint64_t value, size_t bytes) {
  if (const auto own = view.stores.find(unit_of(p)); own != view.stores.end()) {
    for (const BlockView::Store& store : own->second) write(store.data);
    view.stores.erase(own);
  }
  uint64_t before = 0;
  std::memcpy(&before, p, bytes);  // of the lower bytes: the host is little-endian
  const uint64_t sum = before + value;
  write(access(p, &sum, bytes));
  view.seen[unit_of(p)] = now_;
  return before;
}

void DeviceMemory::finish(const BlockView& view) {
  for (const auto& [unit, stores] : view.stores)
    for (const BlockView::Store& store : stores)
      std::memcpy(store.data.at, store.data.bytes.data(), store.data.count);
}

void DeviceMemory::write(const AccessBytes& data) {
  changes_[unit_of(data.at)].push_back({++now_, access(data.at, data.at, data.count)});
  std::memcpy(data.at, data.bytes.data(), data.count);
}

}  // namespace turbomind::emulator
