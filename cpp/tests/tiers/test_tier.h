// A tier in memory that outlives its engine, and can be slow, lossy and full of other pages.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cache/kv_layout.h"
#include "tiers/lower_tier.h"

namespace turbomind::fuzz {

// The pages that several engines, one after another, share.
struct Shelf {
  struct Item {
    StoredPage page;
    std::vector<uint8_t> payload;
  };
  using Name = std::pair<std::pair<uint64_t, uint64_t>, int>;
  std::mutex mutex;
  std::map<Name, Item> items;
  std::mt19937 random{7};

  // Faults, per thousand reads or writes.
  std::atomic<int> vanish{0}, mistake{0}, refuse{0};
  std::atomic<int> delay_us{0};  // of a read
  std::set<Name> torn;           // found, and cannot be read
  std::atomic<int> reads{0};
  // While this is set, a read waits after it has its page, and a write before it begins.
  std::atomic<bool> held{false};
  std::atomic<int> waiting{0};
  void wait() {
    ++waiting;
    held.wait(true);
    --waiting;
  }
  void release() {
    held = false;
    held.notify_all();
  }

  static Name name(const BlockHash& key, int group) { return {{key.lo, key.hi}, group}; }
  bool happens(int per_thousand) { return static_cast<int>(random() % 1000) < per_thousand; }
};

class TestTier : public LowerTier {
 public:
  TestTier(std::shared_ptr<Shelf> shelf, std::string numerics)
      : shelf_(std::move(shelf)), numerics_(std::move(numerics)) {}

  std::optional<PageRef> find(const BlockHash& key, int group) const override {
    std::lock_guard lock(shelf_->mutex);
    const auto it = shelf_->items.find(Shelf::name(key, group));
    if (it == shelf_->items.end()) return std::nullopt;
    return ref_of(it->second.page);
  }

  std::optional<PageRef> find_prefix(const BlockHash& parent, int group, const int32_t* tokens,
                                     int count, int* shared) const override {
    std::lock_guard lock(shelf_->mutex);
    std::optional<PageRef> best;
    *shared = 0;
    for (const auto& [name, item] : shelf_->items) {
      const StoredPage& page = item.page;
      if (!(page.parent == parent) || page.group != group) continue;
      int same = 0;
      while (same < count && same < static_cast<int>(page.tokens.size()) &&
             page.tokens[same] == tokens[same])
        ++same;
      if (same > *shared) *shared = same, best = ref_of(page);
    }
    return best;
  }

  bool read(const PageRef& ref, StoredPage* page, uint8_t* payload) override {
    const bool done = copy(ref, page, payload);
    shelf_->wait();
    return done;
  }

  bool write(const StoredPage& page, const uint8_t* payload) override {
    shelf_->wait();
    std::lock_guard lock(shelf_->mutex);
    if (shelf_->happens(shelf_->refuse)) return false;
    const Shelf::Name name = Shelf::name(page.key, page.group);
    const auto it = shelf_->items.find(name);
    if (it != shelf_->items.end() &&
        (it->second.page.numerics == numerics_ || page.numerics != numerics_))
      return true;
    // Completely or not at all, also out of memory.
    Shelf::Item item{page, {payload, payload + page.payload_bytes}};
    if (it != shelf_->items.end()) {
      it->second = std::move(item);
    } else {
      shelf_->items.emplace(name, std::move(item));
    }
    ++writes_;
    return true;
  }

  void touch(const std::vector<BlockHash>& keys, float retention_priority) override {
    std::lock_guard lock(shelf_->mutex);
    for (auto& [name, item] : shelf_->items)
      for (const BlockHash& key : keys)
        if (item.page.key == key) item.page.retention_priority = retention_priority;
  }
  void remove(const std::vector<BlockHash>& keys) override {
    std::lock_guard lock(shelf_->mutex);
    std::erase_if(shelf_->items, [&keys](const auto& entry) {
      const StoredPage& page = entry.second.page;
      const bool partial = page.tokens.size() < kPageTokens;
      for (const BlockHash& key : keys)
        if (page.key == key || (partial && page.parent == key)) return true;
      return false;
    });
  }
  void retain_only(const std::vector<BlockHash>&) override {}
  TierStats stats() const override {
    std::lock_guard lock(shelf_->mutex);
    TierStats stats;
    stats.pages = static_cast<int64_t>(shelf_->items.size());
    stats.writes = writes_;
    return stats;
  }

 private:
  bool copy(const PageRef& ref, StoredPage* page, uint8_t* payload) {
    ++shelf_->reads;
    if (const int us = shelf_->delay_us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    std::lock_guard lock(shelf_->mutex);
    auto it = shelf_->items.find(Shelf::name(ref.key, ref.group));
    if (it == shelf_->items.end()) return false;
    if (shelf_->torn.contains(it->first) || shelf_->happens(shelf_->vanish)) {
      shelf_->items.erase(it);
      return false;
    }
    if (shelf_->happens(shelf_->mistake)) {  // returns a wrong page: the engine must detect it
      it = shelf_->items.begin();
      if (it->second.page.payload_bytes > ref.payload_bytes) return false;
    }
    *page = it->second.page;
    std::memcpy(payload, it->second.payload.data(), it->second.payload.size());
    return true;
  }

  PageRef ref_of(const StoredPage& page) const {
    PageRef ref;
    ref.key = page.key;
    ref.parent = page.parent;
    ref.group = page.group;
    ref.count = static_cast<int>(page.tokens.size());
    ref.payload_bytes = page.payload_bytes;
    ref.foreign = page.numerics != numerics_;
    return ref;
  }

  const std::shared_ptr<Shelf> shelf_;
  const std::string numerics_;
  int64_t writes_ = 0;
};

}  // namespace turbomind::fuzz
