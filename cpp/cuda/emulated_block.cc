#include "cuda/emulated_block.h"

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

std::string where(const Block& block, unsigned thread) {
  return "block (" + std::to_string(block.index.x) + ", " + std::to_string(block.index.y) + ", " +
         std::to_string(block.index.z) + "), thread " + std::to_string(thread);
}

void switch_lane(Thread& from, Thread& to) {
  current_lane = &to;
  Fiber::switch_to(from.fiber, to.fiber);
}

}  // namespace

TM_NOT_TRACED void BlockRun::thread_main() {
  Thread* const me = &running();
  Fiber* const next = me->run->run_thread(*me);
  Fiber::switch_to(me->fiber, *next, true);
}

// Returns the fiber to continue after this thread has returned or failed, when its stack is empty.
Fiber* BlockRun::run_thread(Thread& me) {
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
    not_ready_ = failure.not_ready;
  }
  return host_;
}

void BlockRun::prepare(const Launch& launch, Fiber& host, Random& random) {
  launch_ = &launch;
  host_ = &host;
  random_ = &random;
  block_ = Block{};
  block_.grid = launch.grid;
  block_.threads = Dim3(static_cast<unsigned>(launch.threads));
  block_.shared_bytes = launch.shared_bytes;
  // Allocated per launch, exactly as large as asked for: the address sanitizer sees an overrun.
  void* memory = nullptr;
  if (launch.shared_bytes && posix_memalign(&memory, kSharedAlignment, launch.shared_bytes) != 0)
    throw_error(ErrorCode::internal, launch.kernel, ": no memory for ", launch.shared_bytes,
                " bytes of shared memory");
  shared_.reset(memory);
  block_.shared = static_cast<uint8_t*>(memory);
  make_threads(launch.threads);
}

void BlockRun::make_threads(int count) {
  while (threads_.size() < static_cast<size_t>(count))
    threads_.push_back(std::make_unique<Thread>(static_cast<int>(threads_.size())));
  warps_.resize(static_cast<size_t>(count / kWarp));
  for (int i = 0; i < count; ++i) {
    Thread& t = *threads_[i];
    t.thread_index = Dim3(static_cast<unsigned>(i), 0, 0);
    t.block = &block_;
    t.run = this;
    t.warp = &warps_[i / kWarp];
    t.warp->threads[i % kWarp] = &t;
  }
  order_.resize(warps_.size());
  for (size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<int>(i);
}

const Block& BlockRun::finish() {
  shared_.reset();
  return block_;
}

void BlockRun::start(const Dim3& index) {
  block_.index = index;
  if (block_.shared) std::memset(block_.shared, 0xff, block_.shared_bytes);
  for (Warp& warp : warps_) {
    for (Thread* t : warp.threads) {
      t->fiber.start(&BlockRun::thread_main);
      t->copies.clear();
      t->groups.clear();
      t->uncommitted = 0;
      t->waited = false;
    }
  }
  phase_ = 0;
  paused_ = nullptr;
  held_ = false;
  shuffle_warps();
}

void BlockRun::shuffle_warps() {
  for (size_t i = order_.size(); i > 1; --i)
    std::swap(order_[i - 1], order_[random_->below(static_cast<uint32_t>(i))]);
  next_ = 0;
}

bool BlockRun::advance() {
  while (paused_ || next_ < order_.size()) {
    if (paused_)
      resume(*std::exchange(paused_, nullptr));
    else
      run_warp(warps_[order_[next_++]]);
    if (!error_.empty()) return false;
    if (paused_) return true;
  }
  return end_phase();
}

// Runs a warp until a lane pauses or all are at a barrier of the block or have returned.
void BlockRun::run_warp(Warp& warp) {
  warp.arrived = 0;
  warp.direction = random_->below(2) ? 1 : -1;
  resume(warp.first());
}

void BlockRun::resume(Thread& thread) {
  current_lane = &thread;
  Fiber::switch_to(*host_, thread.fiber);
  current_lane = nullptr;
}

void BlockRun::pause() {
  paused_ = &running();
  held_ = random_->below(5) == 0;
  Fiber::switch_to(paused_->fiber, *host_);
}

// Returns whether another phase follows.
bool BlockRun::end_phase() {
  const Thread& a = *warps_[0].threads[0];
  for (const Warp& warp : warps_) {
    const Thread& b = *warp.threads[0];
    if (a.point == b.point) continue;
    error_ = where(block_, a.thread_index.x) + " " + point_name(a.point) + " but thread " +
             std::to_string(b.thread_index.x) + " " + point_name(b.point);
    return false;
  }
  if (a.point != Point::syncthreads) return false;
  ++phase_;
  shuffle_warps();
  return true;
}

void BlockRun::arrive(Point point) {
  Thread& me = running();
  me.point = point;
  if (Thread* next = next_lane(me)) {
    switch_lane(me, *next);
    return;
  }
  check_together(me);
  complete(me);
}

// Returns the next lane of the warp to run, or null if this lane is the last to arrive.
Thread* BlockRun::next_lane(const Thread& me) {
  return ++me.warp->arrived < kWarp ? me.warp->threads[me.place + me.warp->direction] : nullptr;
}

void BlockRun::check_together(const Thread& me) {
  for (const Thread* t : me.warp->threads) {
    if (t->point == me.point) continue;
    throw Failure{std::string(point_name(me.point)) + " but thread " +
                  std::to_string(t->thread_index.x) + " of its warp " + point_name(t->point)};
  }
}

// Runs the operation at which all lanes of the warp have arrived, the running one last.
void BlockRun::complete(Thread& me) {
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
  warp.direction = random_->below(2) ? 1 : -1;
  if (&warp.first() != &me) switch_lane(me, warp.first());
}

}  // namespace turbomind::emulator
