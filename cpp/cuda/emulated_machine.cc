#include "cuda/emulated_machine.h"

#include <algorithm>

#include "core/error.h"
#include "cuda/emulated_stream.h"

namespace turbomind::emulator {

// A device runs blocks in any order; this one starts at a random block, upwards or downwards.
class BlockOrder {
 public:
  BlockOrder(const Dim3& grid, Random& random)
      : grid_(grid),
        blocks_(uint64_t{grid.x} * grid.y * grid.z),
        at_(random.below(static_cast<uint32_t>(std::min<uint64_t>(blocks_, UINT32_MAX)))),
        step_(random.below(2) ? 1 : blocks_ - 1) {}

  uint64_t blocks() const { return blocks_; }
  bool done() const { return taken_ == blocks_; }
  Dim3 take() {
    const uint64_t at = at_, row = at / grid_.x;
    ++taken_;
    at_ = (at_ + step_) % blocks_;
    return Dim3(static_cast<unsigned>(at % grid_.x), static_cast<unsigned>(row % grid_.y),
                static_cast<unsigned>(row / grid_.y));
  }

 private:
  const Dim3 grid_;
  const uint64_t blocks_;
  uint64_t at_, step_, taken_ = 0;
};

LaunchCounters Machine::run(const Launch& launch, uint64_t seed, int blocks_at_once) {
  Fiber host;
  Random random(seed);
  BlockOrder order(launch.grid, random);
  const size_t count = std::min<uint64_t>(static_cast<uint64_t>(blocks_at_once), order.blocks());
  while (blocks_.size() < count) blocks_.push_back(std::make_unique<BlockRun>());
  std::vector<BlockRun*> running;
  for (size_t i = 0; i < count; ++i) {
    running.push_back(blocks_[i].get());
    running.back()->prepare(launch, host, random);
  }
  LaunchCounters done = run_blocks(launch, order, running, random);
  done.launches = 1;
  for (size_t i = 0; i < count; ++i) {
    const Block& sums = blocks_[i]->finish();
    done.bytes_loaded += sums.bytes_loaded;
    done.bytes_stored += sums.bytes_stored;
    done.mmas += sums.mmas;
  }
  return done;
}

LaunchCounters Machine::run_blocks(const Launch& launch, BlockOrder& order,
                                   std::vector<BlockRun*> running, Random& random) {
  LaunchCounters done;
  std::vector<BlockView> views;  // of blocks that have ended
  for (BlockRun* block : running) block->start(order.take());
  std::vector<BlockRun*> free;
  while (!running.empty()) {
    // Blocks that paused may be held back until the others have ended or are held too: one may have
    // done one thing long before the next.
    free.clear();
    for (BlockRun* block : running)
      if (!block->held()) free.push_back(block);
    if (free.empty()) {
      for (BlockRun* block : running) block->release();
      continue;
    }
    BlockRun& block =
        *(free.size() == 1 ? free[0] : free[random.below(static_cast<uint32_t>(free.size()))]);
    if (block.advance()) continue;
    if (!block.error().empty()) {
      const std::string error = block.error();
      const bool retry = block.not_ready();
      int64_t stored = 0;
      for (const BlockRun* one : running) stored += one->bytes_stored();
      blocks_.clear();  // their other threads were abandoned in the middle
      if (retry && stored == 0) throw NotReady();
      throw_error(ErrorCode::internal, launch.kernel, ": ", error);
    }
    ++done.blocks;
    if (device_memory) views.push_back(block.take_view());
    if (order.done())
      running.erase(std::find(running.begin(), running.end(), &block));
    else
      block.start(order.take());
  }
  for (const BlockView& view : views) DeviceMemory::finish(view);
  return done;
}

}  // namespace turbomind::emulator
