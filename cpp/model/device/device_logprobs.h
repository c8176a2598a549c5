// Log-probabilities of sampled tokens (ops/logprobs.h), from logits in device memory to the host.
#pragma once

#include <array>

#include "core/tensor.h"
#include "cuda/gpu_context.h"
#include "ops/logprobs_cuda.h"

namespace turbomind {

class LogprobReader {
 public:
  explicit LogprobReader(GpuContext& gpu);
  // Has room for `rows` rows of `top` likeliest tokens each. Called while no result is unread.
  void reserve(int64_t rows, int64_t top);
  // See StepOutputs::submit_logprobs. `tokens` are those that were sampled, in device memory.
  void submit(const Mat& logits, int vocab, const int32_t* tokens, const LogprobRow* rows,
              int64_t count);
  void read(Logprob* out);         // of the oldest submit(); waits
  void discard() { unread_ = 0; }  // drops all results, once the stream has been waited for
  void release() noexcept;         // frees device memory: no call follows

 private:
  // Pinned, of one submit() until it is read.
  struct Slot {
    PinnedBuffer rows, entries;
    GpuEvent done;
    int64_t count = 0;  // of entries
  };
  void grow(size_t row_bytes, size_t entry_bytes);
  void make_room(Slot& slot);

  GpuContext& gpu_;
  DeviceBuffer rows_, entries_;
  std::array<Slot, 2> slots_;
  int oldest_ = 0;  // of the slots
  int unread_ = 0;
};

}  // namespace turbomind
