// Reads rows of source matrices from checkpoint files into memory of our own.
//
// A memory map of a checkpoint would end the process (SIGBUS) where the file shrinks, or its disk
// fails, while a weight is packed. pread reports both.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "core/memory.h"
#include "core/thread_pool.h"
#include "linear/codes/code_source.h"
#include "linear/weight_format.h"

namespace turbomind {

class WeightReader {
 public:
  // Returns the segments with their rows in memory, whole ones also where only some of their
  // columns are asked for, until the next call: read from files, or made. Segments that are in
  // memory stay as they are.
  // Throws Error(model) for a file that cannot be read or has become shorter.
  std::vector<RowSegment> read(ThreadPool& pool, std::vector<RowSegment> segments);

 private:
  HugeBuffer buffer_;
  std::deque<CodePiece> pieces_;
};

}  // namespace turbomind
