// The order in which the AMX kernel of many rows walks a product.
#pragma once

#include <cstdint>

namespace turbomind {

// Every choice gives the same bits; benchmarks/tune_amx.py measures which is fastest.
struct TileOrder {
  // Of a register block's two operands, one stays in the first-level cache while the other moves.
  enum class Stays : uint8_t { weights, rows };

  // Weights and rows of this many K blocks are used up before the next: two panels of 8 blocks are
  // 16 KiB, a third of the first-level cache, and as much of x and of the sums passes by.
  int chunk_k_blocks = 8;
  Stays stays = Stays::weights;
  // The operand that moves is loaded by TILELOADDT1, so that it does not evict the other.
  bool stream = false;
};

}  // namespace turbomind
