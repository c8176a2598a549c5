#include "cuda/emulated_machine.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "cuda/emulated_warp.h"

namespace turbomind::emulator {

namespace {

constexpr size_t kSharedAlignment = 128;

const char* point_name(Point p) {
  switch (p) {
    case Point::syncthreads:
      return "waits at __syncthreads";
    case Point::returned:
      return "has returned";
    case Point::syncwarp:
      return "waits at __syncwarp";
    case Point::shuffle:
      return "waits in a shuffle";
    case Point::vote:
      return "waits in a vote";
    case Point::mma:
      return "waits in mma16816";
    case Point::ldmatrix:
      return "waits in ldmatrix";
  }
  return "";
}

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

// A device runs blocks in any order; this one starts at a random block, upwards or downwards.
class BlockOrder {
 public:
  BlockOrder(const Dim3& grid, Random& random)
      : grid_(grid),
        blocks_(uint64_t{grid.x} * grid.y * grid.z),
        at_(random.below(static_cast<uint32_t>(std::min<uint64_t>(blocks_, UINT32_MAX)))),
        step_(random.below(2) ? 1 : blocks_ - 1) {}

  bool done() const { return taken_ == blocks_; }
  void advance() {
    ++taken_;
    at_ = (at_ + step_) % blocks_;
  }
  Dim3 index() const {
    const uint64_t row = at_ / grid_.x;
    return Dim3(static_cast<unsigned>(at_ % grid_.x), static_cast<unsigned>(row % grid_.y),
                static_cast<unsigned>(row / grid_.y));
  }

 private:
  const Dim3 grid_;
  const uint64_t blocks_;
  uint64_t at_, step_, taken_ = 0;
};

std::string where(const Block& block, unsigned thread) {
  return "block (" + std::to_string(block.index.x) + ", " + std::to_string(block.index.y) + ", " +
         std::to_string(block.index.z) + "), thread " + std::to_string(thread);
}

}  // namespace

TM_NOT_TRACED void Machine::thread_main() {
  Thread* const me = &running();
  Fiber* const next = me->machine->run_thread(*me);
  Fiber::switch_to(me->fiber, *next, true);
}

// Returns the fiber to continue after this thread has returned or failed, when its stack is empty.
Fiber* Machine::run_thread(Thread& me) {
  try {
    launch_->entry(launch_->params.data());
    if (!me.waited) fail("returned without wait_for_previous");
    me.point = Point::returned;
    if (Thread* next = next_lane(me)) {
      current_lane = next;
      return &next->fiber;
    }
    check_together(me);
  } catch (const Failure& failure) {
    error_ = where(block_, me.thread_index.x) + ": " + failure.what;
  }
  return host_;
}

void Machine::prepare(const Launch& launch) {
  launch_ = &launch;
  block_ = Block{};
  block_.grid = launch.grid;
  block_.threads = Dim3(static_cast<unsigned>(launch.threads));
  block_.shared_bytes = launch.shared_bytes;
  while (threads_.size() < static_cast<size_t>(launch.threads))
    threads_.push_back(std::make_unique<Thread>(static_cast<int>(threads_.size())));
  warps_.resize(static_cast<size_t>(launch.threads / kWarp));
  for (int i = 0; i < launch.threads; ++i) {
    Thread& t = *threads_[i];
    t.thread_index = Dim3(static_cast<unsigned>(i), 0, 0);
    t.block = &block_;
    t.machine = this;
    t.warp = &warps_[i / kWarp];
    t.warp->threads[i % kWarp] = &t;
  }
  order_.resize(warps_.size());
  for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int>(i);
}

LaunchCounters Machine::run(const Launch& launch, uint64_t seed) {
  LaunchCounters done;
  Fiber host;
  host_ = &host;
  prepare(launch);
  random_ = Random(seed);
  error_.clear();
  // malloc'ed per launch and exactly as large as asked for: the address sanitizer sees an overrun.
  void* memory = nullptr;
  if (launch.shared_bytes && posix_memalign(&memory, kSharedAlignment, launch.shared_bytes) != 0)
    throw_error(ErrorCode::internal, launch.kernel, ": no memory for ", launch.shared_bytes,
                " bytes of shared memory");
  const std::unique_ptr<void, FreeDeleter> shared(memory);
  block_.shared = static_cast<uint8_t*>(memory);
  for (BlockOrder order(launch.grid, random_); !order.done(); order.advance()) {
    block_.index = order.index();
    run_block();
    ++done.blocks;
    if (error_.empty()) continue;
    threads_.clear();  // the other threads were abandoned in the middle
    throw_error(ErrorCode::internal, launch.kernel, ": ", error_);
  }
  done.launches = 1;
  done.bytes_loaded = block_.bytes_loaded;
  done.bytes_stored = block_.bytes_stored;
  done.mmas = block_.mmas;
  return done;
}

void Machine::run_block() {
  if (block_.shared) std::memset(block_.shared, 0xff, block_.shared_bytes);
  for (Warp& warp : warps_) {
    for (Thread* t : warp.threads) {
      t->fiber.start(&Machine::thread_main);
      t->copies.clear();
      t->groups.clear();
      t->uncommitted = 0;
      t->waited = false;
    }
  }
  do {
    for (size_t i = order_.size(); i > 1; --i)
      std::swap(order_[i - 1], order_[random_.below(static_cast<uint32_t>(i))]);
    for (const int w : order_) {
      run_warp(warps_[w]);
      if (!error_.empty()) return;
    }
    check_phase();
  } while (error_.empty() && warps_[0].threads[0]->point == Point::syncthreads);
}

// Runs a warp until all its lanes are at a barrier of the block or have returned.
void Machine::run_warp(Warp& warp) {
  warp.arrived = 0;
  warp.direction = random_.below(2) ? 1 : -1;
  switch_to(*host_, warp.first());
  current_lane = nullptr;
}

void Machine::check_phase() {
  const Thread& a = *warps_[0].threads[0];
  for (const Warp& warp : warps_) {
    const Thread& b = *warp.threads[0];
    if (a.point == b.point) continue;
    error_ = where(block_, a.thread_index.x) + " " + point_name(a.point) + " but thread " +
             std::to_string(b.thread_index.x) + " " + point_name(b.point);
    return;
  }
}

void Machine::arrive(Point point) {
  Thread& me = running();
  me.point = point;
  if (Thread* next = next_lane(me)) {
    switch_to(me.fiber, *next);
    return;
  }
  check_together(me);
  complete(me);
}

// Returns the next lane of the warp to run, or null if this lane is the last to arrive.
Thread* Machine::next_lane(const Thread& me) {
  return ++me.warp->arrived < kWarp ? me.warp->threads[me.place + me.warp->direction] : nullptr;
}

void Machine::check_together(const Thread& me) {
  for (const Thread* t : me.warp->threads) {
    if (t->point == me.point) continue;
    throw Failure{std::string(point_name(me.point)) + " but thread " +
                  std::to_string(t->thread_index.x) + " of its warp " + point_name(t->point)};
  }
}

// Runs the operation at which all lanes of the warp have arrived, the running one last.
void Machine::complete(Thread& me) {
  Warp& warp = *me.warp;
  warp.arrived = 0;
  switch (me.point) {
    case Point::returned:
      return;  // run_thread handles it
    case Point::syncthreads:
      Fiber::switch_to(me.fiber, *host_);
      return;  // all warps have arrived: the next phase starts
    case Point::syncwarp:
      break;
    case Point::shuffle:
      do_shuffle(warp);
      break;
    case Point::vote:
      do_vote(warp);
      break;
    case Point::mma:
      ++block_.mmas;
      do_mma(warp);
      break;
    case Point::ldmatrix:
      do_ldmatrix(warp);
      break;
  }
  warp.direction = random_.below(2) ? 1 : -1;
  if (&warp.first() != &me) switch_to(me.fiber, warp.first());
}

}  // namespace turbomind::emulator
