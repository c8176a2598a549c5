// Carries pages between the device and the tiers below it, on threads of its own.
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

// One page on its way, or something else that the tiers are to do. Posted by the engine thread,
// which sees it again among the done ones.
struct PageMove {
  enum class Kind : uint8_t { load, save, task };
  Kind kind = Kind::task;
  int32_t page = -1;  // of the device, in record.group
  // save: what is written. load: parent and group of the stored page, the tokens that are wanted of
  // it, its first ones, and where that is all of them its key.
  StoredPage record;
  bool exact = false;                    // load: none of another numerics fingerprint
  std::function<void(LowerTier&)> task;  // for each tier; null: a mark in the order of saves
  bool removes = false;                  // task: what was read before it is stored nowhere after

  // Results, to be read when it is done.
  bool succeeded = false;  // load: the page has it. save: the lowest tier has it
  bool foreign = false;    // load
  size_t tier = 0;         // load: where it was found
  size_t bytes = 0;        // load: of payload
  double seconds = 0;      // load: reading and writing to the device

  void* owner = nullptr;  // the engine thread's

 private:
  friend class PageMoverThreads;
  bool revoked = false;   // the device's page is no longer to be touched
  bool touching = false;  // it is just now
};

// Two threads load, so that one reads while the other one copies to the device. The first of them
// also does everything else, in its order, when there is nothing to load. When there is nothing to
// do at all, what was written is synced and the tiers tidy up.
class PageMover {
 public:
  using Moves = std::list<std::shared_ptr<PageMove>>;
  static constexpr int kLoaders = 2;      // threads
  static constexpr double kPatience = 5;  // seconds that the end waits for a tier

  // `wake` is called, on a thread of the mover's, when something is done. The tiers are given up at
  // the end, by the last thread.
  PageMover(Model& model, SharedTiers tiers, std::function<void()> wake);
  ~PageMover() { stop(kPatience); }
  PageMover(const PageMover&) = delete;
  PageMover& operator=(const PageMover&) = delete;

  void post(Moves&& moves) noexcept;  // of one kind
  Moves take_done() noexcept;
  // From now on the move does not touch the device's page: it is not begun, or ends without that.
  // Waits at most while a page is copied.
  void revoke(PageMove& move) noexcept;
  bool wait_done(double seconds);  // until something is done; false on time-out
  // Ends what is being moved, leaves the rest; idempotent. False when a tier did not come back
  // within `seconds`, as one does whose disk hangs: the threads are then left behind with the tiers
  // and whatever else they use, and touch nothing more of the engine's or the model's.
  bool stop(double seconds) noexcept;

  const std::vector<LowerTier*>& tiers() const { return tiers_; }  // until stop()

 private:
  const std::vector<LowerTier*> tiers_;
  const std::shared_ptr<PageMoverThreads> shared_;
  std::thread first_, second_;
  bool left_behind_ = false;
};

}  // namespace turbomind
