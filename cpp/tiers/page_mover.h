// Moves pages between the device and the lower tiers, on threads of its own. What is moved, and
// when, is decided by PageFetcher and PageSaver.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "model/model.h"
#include "tiers/lower_tier.h"
#include "tiers/tier_types.h"

namespace turbomind {

class PageMoverThreads;

// A page to load or to save, or another task for the tiers. The engine thread posts it and gets it
// back from take_done().
struct PageMove {
  enum class Kind : uint8_t { load, save, task };
  Kind kind = Kind::task;
  int32_t page = -1;  // of the device, in group record.group
  // save: the page to write. load: parent and group of the stored page, its first tokens as far as
  // they are needed, and if those are all of its tokens its block hash.
  StoredPage record;
  bool exact = false;                    // load: not from another numerics fingerprint
  bool host_only = false;                // save: to the first tier only
  std::function<void(LowerTier&)> task;  // run for each tier; null: a mark in the order of saves
  bool removes = false;                  // task: pages read before it are not stored after it

  // Results, valid when it is done.
  bool succeeded = false;  // load: the device page is filled. save: the lowest tier has the page
  bool foreign = false;    // load: the KV is of another numerics fingerprint
  size_t tier = 0;         // load: where it was found
  size_t bytes = 0;        // load: of payload
  double seconds = 0;      // load: reading and writing to the device

  void* owner = nullptr;  // for the engine thread

 private:
  friend class PageMoverThreads;
  bool revoked = false;   // the device's page must not be touched any more
  bool touching = false;  // it is being read or written now
};

// Two threads load, so that one reads while the other one copies to the device. The first of them
// also does everything else, in order, when there is nothing to load. When there is nothing to do
// at all, it syncs what was written and lets the tiers do maintenance. Called by the engine thread.
class PageMover {
 public:
  using Moves = std::list<std::shared_ptr<PageMove>>;
  static constexpr int kLoaders = 2;      // threads
  static constexpr double kPatience = 5;  // seconds that stop() waits for a tier

  // `wake` is called on a thread of the mover when a move is done. The last thread to end destroys
  // the tiers.
  PageMover(Model& model, SharedTiers tiers, std::function<void()> wake);
  ~PageMover() { stop(kPatience); }
  PageMover(const PageMover&) = delete;
  PageMover& operator=(const PageMover&) = delete;

  // Queues moves, all of the same kind.
  void post(Moves&& moves) noexcept;
  // Returns the moves that are done, and those that failed.
  Moves take_done() noexcept;
  // Makes the move not touch the device's page from now on. Waits at most while a page is copied.
  void revoke(PageMove& move) noexcept;
  // Waits for at most `seconds` until a move is done; false on time-out.
  bool wait_done(double seconds);
  // Finishes moves that have begun, drops the rest and ends the threads; idempotent. Returns false
  // when a tier did not return within `seconds`, as one whose disk hangs: the threads are then
  // detached with the tiers and buffers, and touch neither engine nor model any more.
  bool stop(double seconds) noexcept;

  const std::vector<LowerTier*>& tiers() const { return tiers_; }  // until stop()

 private:
  const std::vector<LowerTier*> tiers_;
  const std::shared_ptr<PageMoverThreads> shared_;
  std::thread first_, second_;
  bool detached_ = false;
};

}  // namespace turbomind
