// Log-probabilities of drawn tokens, on their way from logits in device memory to the host.
#pragma once

#include <array>

#include "core/tensor.h"
#include "cuda/gpu_context.h"
#include "ops/logprobs_cuda.h"

namespace turbomind {

class LogprobReader {
 public:
  explicit LogprobReader(GpuContext& gpu);
  // For `rows` rows of `top` likeliest tokens each; with nothing to be read.
  void reserve(int64_t rows, int64_t top);
  // Does not wait; see Model::submit_logprobs. `tokens` are those drawn, in device memory. At most
  // two are to be read.
  void submit(const Mat& logits, int vocab, const int32_t* tokens, const DeviceLogprobRow* rows,
              int64_t count);
  void read(DeviceLogprob* out);  // of the oldest; waits
  void forget() { unread_ = 0; }  // once the stream has been waited for
  void give_back() noexcept;      // the device's memory; nothing is asked any more

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
