// How the CPU cuts a step's attention into tasks for its threads.
//
// Keys are taken in splits of 512, counted from the sequence's first token. A split gives every
// query row a fresh (maximum, sum, output); splits are merged in order into spans of 8, spans in
// order into the result. A task takes all keys of some rows, or one split or span of them; then the
// last task of those rows merges what the others found. What is merged with what depends on
// positions alone, so a row has the same bits under any plan.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/attention_kernels.h"

namespace turbomind {

struct AttentionSeq;

struct AttentionTaskShape {
  int group;  // query heads of a KV head; a sequence has q_len * group rows per KV head
  int kv_heads;
  int window;
  int step_rows;  // rows that the kernel takes at once
  int most_rows;  // rows of a task, a multiple of step_rows
  int workers;
};

// The tasks of one sequence: a block of rows of a KV head, or one unit of keys of it.
struct SeqTasks {
  int64_t seq;
  int64_t blocks;  // of block_rows rows
  int block_rows;
  int unit_keys;  // kTaskSplitKeys or kTaskSpanKeys; 0: a task takes all keys of its rows
  int64_t units;  // most units that a block sees; 1 where unit_keys is 0
  int64_t first_task;
  int64_t first_row;    // of the partial results: [head][block][unit][block_rows]
  int64_t first_block;  // of the counters of finished units: [head][block]
  double cost;          // of a task
};

// One task. `unit` counts from the first unit of keys that the block sees, and may lie after its
// last one: then there is nothing to do.
struct AttentionTask {
  const SeqTasks* of;
  int64_t head, block, unit;
};

// Keys that rows of a block see, as units [first, last].
struct UnitRange {
  int64_t first, last;
};

// The plan of a step. Costly tasks come first, so that the threads finish together. It holds what
// it allocated, so that plans of one size allocate nothing.
class AttentionTasks {
 public:
  void plan(const AttentionTaskShape& shape, const AttentionSeq* seqs, int64_t count);

  int64_t size() const { return size_; }
  AttentionTask task(int64_t index) const;
  UnitRange units(const AttentionSeq& seq, const SeqTasks& tasks, int64_t block) const;
  int64_t partial_rows() const { return partial_rows_; }
  int64_t split_blocks() const { return split_blocks_; }
  const std::vector<SeqTasks>& sequences() const { return seqs_; }

  // Most partial_rows() and split_blocks() of any plan for so many workers.
  static int64_t most_partial_rows(int workers) {
    return workers > 1 ? 1024 * int64_t{workers} : 0;
  }
  static int64_t most_split_blocks(int workers) { return workers > 1 ? 64 * int64_t{workers} : 0; }

 private:
  void cut(SeqTasks& tasks, const AttentionSeq& seq, double target);
  bool split(SeqTasks& tasks, const AttentionSeq& seq, int unit_keys);

  AttentionTaskShape shape_{};
  std::vector<SeqTasks> seqs_;
  int64_t size_ = 0, partial_rows_ = 0, split_blocks_ = 0;
};

}  // namespace turbomind
