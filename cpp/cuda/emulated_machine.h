// Runs a launch: its blocks one after another, or several at once. Internal to the emulator.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/emulated_block.h"

namespace turbomind::emulator {

class BlockOrder;

class Machine {
 public:
  LaunchCounters run(const Launch& launch, uint64_t seed, int blocks_at_once);

 private:
  LaunchCounters run_blocks(const Launch& launch, BlockOrder& order, std::vector<BlockRun*> running,
                            Random& random);

  std::vector<std::unique_ptr<BlockRun>> blocks_;  // kept for their threads' stacks
};

}  // namespace turbomind::emulator
