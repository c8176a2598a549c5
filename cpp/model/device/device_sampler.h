// Draws tokens from logits in device memory.
#pragma once

#include <array>

#include "core/tensor.h"
#include "cuda/gpu_context.h"
#include "ops/sample_cuda.h"

namespace turbomind {

class DeviceSampler {
 public:
  explicit DeviceSampler(GpuContext& gpu);
  void reserve(int64_t count);  // rows of a submit(); with nothing to be read
  // Draws from rows of `logits` and does not wait; see Model::submit_sample. At most two are to be
  // read.
  void submit(const Mat& logits, int vocab, const DeviceSampleRow* rows, int64_t count);
  void read(int32_t* tokens);     // of the oldest; waits
  void forget() { unread_ = 0; }  // once the stream has been waited for
  void give_back() noexcept;      // device memory, which nothing uses any more
  // Of the last submit(), in device memory; null before the first.
  const int32_t* drawn() const { return tokens_.as<int32_t>(); }

 private:
  // Pinned, of one submit() until it is read.
  struct Slot {
    PinnedBuffer rows, tokens;
    GpuEvent done;
    int64_t count = 0;
  };
  void grow(int64_t count);
  void make_room(Slot& slot);

  GpuContext& gpu_;
  DeviceBuffer rows_, tokens_, scratch_;
  std::array<Slot, 2> slots_;
  int oldest_ = 0;  // of the slots
  int unread_ = 0;
};

}  // namespace turbomind
