// Samples tokens from logits in device memory (ops/sample.h).
#pragma once

#include <array>

#include "core/tensor.h"
#include "cuda/gpu_context.h"
#include "ops/sample_cuda.h"

namespace turbomind {

class DeviceSampler {
 public:
  explicit DeviceSampler(GpuContext& gpu);
  // Has room for submits of `count` rows. Called while no result is unread.
  void reserve(int64_t count);
  // See StepOutputs::submit_sample; rows are those of `logits` [rows, vocab].
  void submit(const Mat& logits, int vocab, const SampleRow* rows, int64_t count);
  void read(int32_t* tokens);      // of the oldest submit(); waits
  void discard() { unread_ = 0; }  // drops all results, once the stream has been waited for
  void release() noexcept;         // frees device memory: no call follows
  // Returns the tokens of the last submit(), in device memory; null before the first.
  const int32_t* sampled() const { return tokens_.as<int32_t>(); }
  // The same in pinned memory, once the event has passed; until two more submits with rows.
  const int32_t* pinned_tokens() const { return last().tokens.as<int32_t>(); }
  EventHandle done() const { return last().done.handle(); }

 private:
  // Pinned, of one submit() until it is read.
  struct Slot {
    PinnedBuffer rows, tokens;
    GpuEvent done;
    int64_t count = 0;
  };
  void grow(int64_t count);
  void make_room(Slot& slot);
  const Slot& last() const { return slots_[(oldest_ + unread_ - 1) % slots_.size()]; }

  GpuContext& gpu_;
  DeviceBuffer rows_, tokens_, scratch_;
  std::array<Slot, 2> slots_;
  int oldest_ = 0;  // of the slots
  int unread_ = 0;
};

}  // namespace turbomind
