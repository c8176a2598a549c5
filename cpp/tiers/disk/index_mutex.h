// The mutex of the disk tier's index. The engine thread takes it for lookups of microseconds, other
// threads for scans of many thousand records.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>

namespace turbomind {

// Meets Lockable.
class IndexMutex {
 public:
  void lock() {
    if (mutex_.try_lock()) return;
    waiting_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiting_.fetch_sub(1, std::memory_order_relaxed);
  }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() { mutex_.unlock(); }

  // Called by a scan after each record, with the lock held: releases it for a moment if others wait
  // for it. What it protects may have changed afterwards as lookups change it.
  void pass() {
    ++passes_;
    if (waiting_.load(std::memory_order_relaxed) == 0) return;
    mutex_.unlock();
    // A mutex is not fair: without a pause the scan would take it again before they wake.
    for (int i = 0; i < kYields && waiting_.load(std::memory_order_relaxed) > 0; ++i)
      std::this_thread::yield();
    mutex_.lock();
  }
  // Returns how often scans called pass(); with the lock held.
  int64_t passes() const { return passes_; }

 private:
  static constexpr int kYields = 1000;

  std::mutex mutex_;
  std::atomic<int> waiting_{0};
  int64_t passes_ = 0;
};

}  // namespace turbomind
