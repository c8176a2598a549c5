// Carries pages between the device and the tiers below it, on a thread of its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cache/lower_tier.h"
#include "model/model.h"

namespace turbomind {

// One page on its way, or something else that the tiers are to do. Posted by the engine thread,
// which sees it again among the done ones.
struct PageMove {
  enum class Kind : uint8_t { load, save, chore };
  Kind kind = Kind::chore;
  int32_t page = -1;  // of the device, in record.group
  // save: what is written. load: parent and group of the stored page, the tokens that are wanted of
  // it, its first ones, and where that is all of them its key.
  StoredPage record;
  bool exact = false;                     // load: none of another numerics id
  std::function<void(LowerTier&)> chore;  // for each tier; null: a mark in the order of saves

  // Results, to be read when it is done.
  bool succeeded = false;  // load: the page has it. save: the lowest tier has it
  bool foreign = false;    // load
  size_t tier = 0;         // load: where it was found
  size_t bytes = 0;        // load: of payload
  double seconds = 0;      // load: reading and writing to the device

  void* owner = nullptr;  // the engine thread's

 private:
  friend class PageMover;
  bool revoked = false;   // the device's page is no longer to be touched
  bool touching = false;  // it is just now
  bool touched = false;   // it was
};

// Loads go before everything else, which keeps its order. When there is nothing to do, what was
// written is synced and the tiers tidy up.
class PageMover {
 public:
  using Moves = std::list<std::shared_ptr<PageMove>>;

  // `wake` is called, on the mover's thread, when something is done.
  PageMover(Model& model, std::vector<LowerTier*> tiers, std::function<void()> wake);
  ~PageMover() { stop(); }

  void post(Moves&& moves) noexcept;  // of one kind
  Moves take_done() noexcept;
  // From now on the move does not touch the device's page: it is not begun, or ends without that.
  // Waits at most while a page is copied. True when the page was never touched.
  bool revoke(PageMove& move) noexcept;
  bool wait_done(double seconds);  // until something is done; false on time-out
  void stop() noexcept;            // ends what is being moved, leaves the rest; idempotent

  const std::vector<LowerTier*>& tiers() const { return tiers_; }

 private:
  void loop() noexcept;
  bool next(Moves& current);
  bool idle_chores(std::unique_lock<std::mutex>& lock);
  void run(PageMove& move);
  void load(PageMove& move);
  bool load_from(size_t tier, PageMove& move);
  std::optional<PageRef> find(const LowerTier& tier, const StoredPage& want) const;
  bool wanted(const StoredPage& stored, const PageMove& move) const;
  void promote() noexcept;
  void save(PageMove& move);
  template <typename F>
  bool touch(PageMove& move, F&& copy);

  Model& model_;
  const std::vector<LowerTier*> tiers_;
  const std::function<void()> wake_;

  std::mutex mutex_;
  std::condition_variable work_, done_news_, touched_;
  Moves loads_, others_, done_;
  bool stop_ = false;
  int chores_left_ = 0;  // rounds of tidying up since something was written
  bool unsynced_ = false;

  // The mover's thread alone.
  std::vector<uint8_t> buffer_;
  StoredPage loaded_;       // what buffer_ has
  size_t loaded_from_ = 0;  // tiers above this one do not have it yet
  std::thread thread_;      // the last member: it starts when everything else is there
};

}  // namespace turbomind
