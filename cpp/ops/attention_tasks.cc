#include "ops/attention_tasks.h"

#include <algorithm>

#include "ops/attention.h"

namespace turbomind {

namespace {

// So many keys take a thread less time than waking others does.
constexpr int64_t kFewKeys = 2 * kTaskSplitKeys;
// Tasks per worker that even out their different lengths.
constexpr double kTasksPerWorker = 4;
// Reading a key's K and V costs about as much as computing so many rows with it.
constexpr double kReadRows = 8;

int64_t ceil_div(int64_t n, int64_t d) {
  return (n + d - 1) / d;
}

double cost_of(double rows, double keys) {
  return keys * (rows + kReadRows);
}

// The most keys that one row of a sequence sees, and that `queries` queries in a row see together.
int64_t keys_of(const AttentionSeq& s, int window, int64_t queries) {
  const int64_t end = s.kv_begin + s.q_len;
  return window ? std::min<int64_t>(end, window + queries - 1) : end;
}

}  // namespace

// The blocks' height, then their keys: tall blocks read K and V less often.
void AttentionTasks::cut(SeqTasks& t, const AttentionSeq& s, double target) {
  const int64_t rows = s.q_len * shape_.group;
  const int64_t keys = keys_of(s, shape_.window, 1);
  const double step = cost_of(shape_.step_rows, static_cast<double>(keys));
  const int64_t most = shape_.most_rows / shape_.step_rows;
  const int64_t steps = ceil_div(rows, shape_.step_rows);
  const int64_t height = step * static_cast<double>(most) <= target
                             ? most
                             : std::max<int64_t>(1, static_cast<int64_t>(target / step));
  t.blocks = ceil_div(steps, std::min(height, steps));
  t.block_rows = static_cast<int>(ceil_div(steps, t.blocks) * shape_.step_rows);
  t.blocks = ceil_div(rows, t.block_rows);
  t.unit_keys = 0;
  t.units = 1;
  const double height_rows = static_cast<double>(std::min<int64_t>(rows, t.block_rows));
  t.cost = cost_of(height_rows, static_cast<double>(keys));
  if (t.cost <= target || keys <= kFewKeys) return;
  const bool spans = cost_of(height_rows, kTaskSpanKeys) <= target && keys > kTaskSpanKeys;
  const int unit = spans ? kTaskSpanKeys : kTaskSplitKeys;
  if (!split(t, s, unit)) {
    if (spans || keys <= kTaskSpanKeys || !split(t, s, kTaskSpanKeys)) return;
  }
  t.cost = cost_of(height_rows, std::min<double>(t.unit_keys, static_cast<double>(keys)));
}

// Takes room for the partial results, if there is any left.
bool AttentionTasks::split(SeqTasks& t, const AttentionSeq& s, int unit_keys) {
  const int64_t queries = ceil_div(t.block_rows, shape_.group) + 1;
  const int64_t keys = keys_of(s, shape_.window, queries);
  int64_t units = ceil_div(s.kv_begin + s.q_len, unit_keys);
  if (shape_.window) units = std::min(units, ceil_div(keys, unit_keys) + 1);
  const int64_t height = std::min<int64_t>(s.q_len * shape_.group, t.block_rows);
  const int64_t blocks = t.blocks * shape_.kv_heads, rows = blocks * units * height;
  if (partial_rows_ + rows > most_partial_rows(shape_.workers) ||
      split_blocks_ + blocks > most_split_blocks(shape_.workers)) {
    return false;
  }
  t.unit_keys = unit_keys;
  t.units = units;
  t.block_rows = static_cast<int>(height);
  t.first_row = partial_rows_;
  t.first_block = split_blocks_;
  partial_rows_ += rows;
  split_blocks_ += blocks;
  return true;
}

void AttentionTasks::plan(const AttentionTaskShape& shape, const AttentionSeq* seqs,
                          int64_t count) {
  shape_ = shape;
  size_ = partial_rows_ = split_blocks_ = 0;
  seqs_.clear();
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (seqs[i].q_len <= 0) continue;
    SeqTasks t{};
    t.seq = i;
    seqs_.push_back(t);
    const double rows = static_cast<double>(seqs[i].q_len * shape.group);
    total += cost_of(rows, static_cast<double>(keys_of(seqs[i], shape.window, 1))) * shape.kv_heads;
  }
  const double target = shape.workers > 1 ? total / (kTasksPerWorker * shape.workers) : total;
  for (SeqTasks& t : seqs_) cut(t, seqs[t.seq], target);
  std::sort(seqs_.begin(), seqs_.end(), [](const SeqTasks& a, const SeqTasks& b) {
    return a.cost != b.cost ? a.cost > b.cost : a.seq < b.seq;
  });
  for (SeqTasks& t : seqs_) {
    t.first_task = size_;
    size_ += t.blocks * shape.kv_heads * t.units;
  }
}

// Late blocks see the most keys: they go first.
AttentionTask AttentionTasks::task(int64_t index) const {
  const auto after =
      std::upper_bound(seqs_.begin(), seqs_.end(), index,
                       [](int64_t i, const SeqTasks& t) { return i < t.first_task; });
  const SeqTasks& t = *(after - 1);
  const int64_t at = index - t.first_task, rest = at / t.blocks;
  return {&t, rest / t.units, t.blocks - 1 - at % t.blocks, rest % t.units};
}

UnitRange AttentionTasks::units(const AttentionSeq& s, const SeqTasks& t, int64_t block) const {
  if (t.unit_keys == 0) return {0, 0};
  const int64_t rows = s.q_len * shape_.group, begin = block * t.block_rows;
  const int64_t end = std::min<int64_t>(rows, begin + t.block_rows);
  const int64_t first_query = s.kv_begin + begin / shape_.group;
  const int64_t last_query = s.kv_begin + (end - 1) / shape_.group;
  const int64_t lowest = shape_.window ? std::max<int64_t>(0, first_query - shape_.window + 1) : 0;
  return {lowest / t.unit_keys, last_query / t.unit_keys};
}

}  // namespace turbomind
