#include "cuda/emulated/memory_map.h"

#include <cstdlib>

#include "core/error.h"

namespace turbomind::emulator {

MemoryMap& MemoryMap::get() {
  static MemoryMap& map = *new MemoryMap;  // never destroyed: threads may still run at exit
  return map;
}

void MemoryMap::add(const void* p, const Allocation& allocation) {
  allocations_[static_cast<const uint8_t*>(p)] = allocation;
  if (!allocation.pinned) ++devices_[allocation.device];
}

MemoryMap::Allocation MemoryMap::remove(const void* p) {
  const auto it = allocations_.find(static_cast<const uint8_t*>(p));
  if (it == allocations_.end()) std::abort();  // not ours, or freed twice
  const Allocation allocation = it->second;
  allocations_.erase(it);
  last_device_ = -1;
  if (!allocation.pinned && --devices_[allocation.device] == 0) devices_.erase(allocation.device);
  return allocation;
}

bool MemoryMap::has_range(const char* call, const void* p, size_t bytes) const {
  const auto it = find(p);
  if (it == allocations_.end()) return false;
  const size_t offset = static_cast<size_t>(static_cast<const uint8_t*>(p) - it->first);
  if (bytes > it->second.bytes - offset)
    throw_error(ErrorCode::internal, call, ": ", bytes, " bytes at offset ", offset,
                " of an allocation of ", it->second.bytes);
  return true;
}

const MemoryMap::Allocation* MemoryMap::allocation_of(const void* p) const {
  const auto it = find(p);
  return it == allocations_.end() ? nullptr : &it->second;
}

int MemoryMap::forbidden_owner(int device, const void* p) const {
  if (last_device_ == device && p >= last_begin_ && p < last_end_) return -1;
  const auto it = find(p);
  if (it == allocations_.end()) return -1;  // a driver's own
  const int owner = it->second.device;
  if (!it->second.pinned && owner != device && enabled_.count({device, owner}) == 0) return owner;
  last_device_ = device;
  last_begin_ = it->first;
  last_end_ = it->first + it->second.bytes;
  return -1;
}

std::map<const uint8_t*, MemoryMap::Allocation>::const_iterator MemoryMap::find(
    const void* p) const {
  const uint8_t* at = static_cast<const uint8_t*>(p);
  auto it = allocations_.upper_bound(at);
  if (it == allocations_.begin()) return allocations_.end();
  --it;
  return static_cast<size_t>(at - it->first) < it->second.bytes ? it : allocations_.end();
}

}  // namespace turbomind::emulator
