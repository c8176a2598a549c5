#include "model/device/device_logprobs.h"

#include <algorithm>

#include "cuda/dispatch.h"

namespace turbomind {

TM_GPU_TABLE(LogprobsCuda, kLogprobsCuda, logprobs_cuda)

LogprobReader::LogprobReader(GpuContext& gpu) : gpu_(gpu) {
  for (Slot& slot : slots_) slot.done = GpuEvent(gpu.gpu());
}

void LogprobReader::reserve(int64_t rows, int64_t top) {
  grow(rows * sizeof(LogprobRow), rows * (1 + top) * sizeof(Logprob));
  for (Slot& slot : slots_) make_room(slot);
}

// Freeing device memory waits until no kernel uses it.
void LogprobReader::grow(size_t row_bytes, size_t entry_bytes) {
  if (rows_.size() < row_bytes) rows_ = DeviceBuffer(gpu_.gpu(), row_bytes);
  if (entries_.size() < entry_bytes) entries_ = DeviceBuffer(gpu_.gpu(), entry_bytes);
}

// Called for slots that no copy uses.
void LogprobReader::make_room(Slot& slot) {
  if (slot.rows.size() < rows_.size()) slot.rows = PinnedBuffer(gpu_.gpu(), rows_.size());
  if (slot.entries.size() < entries_.size())
    slot.entries = PinnedBuffer(gpu_.gpu(), entries_.size());
}

void LogprobReader::submit(const Mat& logits, int vocab, const int32_t* tokens,
                           const LogprobRow* rows, int64_t count) {
  const int most = static_cast<int>(slots_.size());
  if (unread_ == most)
    throw_error(ErrorCode::internal, "log-probabilities: ", unread_,
                " steps are unread, expected fewer");
  Slot& slot = slots_[(oldest_ + unread_) % most];
  slot.count = count > 0 ? rows[count - 1].out + 1 + rows[count - 1].top : 0;
  const size_t row_bytes = count * sizeof(LogprobRow);
  const size_t entry_bytes = slot.count * sizeof(Logprob);
  if (row_bytes > rows_.size() || entry_bytes > entries_.size())
    grow(2 * row_bytes, 2 * entry_bytes);
  make_room(slot);
  std::copy_n(rows, count, slot.rows.as<LogprobRow>());
  gpu_.gpu().copy(gpu_.handle(), rows_.data(), slot.rows.data(), row_bytes);
  DeviceLogprobs p;
  p.logits = static_cast<const float*>(logits.data);
  p.stride = logits.stride;
  p.vocab = vocab;
  p.num_rows = static_cast<int32_t>(count);
  p.rows = rows_.as<LogprobRow>();
  p.tokens = tokens;
  p.out = entries_.as<Logprob>();
  logprobs_cuda(gpu_.kind()).logprobs(gpu_.handle(), p);
  gpu_.gpu().copy(gpu_.handle(), slot.entries.data(), entries_.data(), entry_bytes);
  slot.done.record(gpu_.stream());
  ++unread_;
}

void LogprobReader::release() noexcept {
  rows_ = DeviceBuffer();
  entries_ = DeviceBuffer();
}

void LogprobReader::read(Logprob* out) {
  if (unread_ == 0) throw_error(ErrorCode::internal, "log-probabilities: no step is unread");
  const Slot& slot = slots_[oldest_];
  slot.done.synchronize();
  std::copy_n(slot.entries.as<Logprob>(), slot.count, out);
  oldest_ = (oldest_ + 1) % static_cast<int>(slots_.size());
  --unread_;
}

}  // namespace turbomind
