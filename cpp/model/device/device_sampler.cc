#include "model/device/device_sampler.h"

#include <algorithm>

#include "cuda/dispatch.h"

namespace turbomind {

TM_GPU_TABLE(SampleCuda, kSampleCuda, sample_cuda)

DeviceSampler::DeviceSampler(GpuContext& gpu) : gpu_(gpu) {
  for (Slot& slot : slots_) slot.done = GpuEvent(gpu.gpu());
}

void DeviceSampler::reserve(int64_t count) {
  grow(count);
  for (Slot& slot : slots_) make_room(slot);
}

// Freeing device memory waits until no kernel uses it.
void DeviceSampler::grow(int64_t count) {
  tokens_ = DeviceBuffer(gpu_.gpu(), count * sizeof(int32_t));
  scratch_ = DeviceBuffer(gpu_.gpu(), count * sizeof(SampleScratch));
  gpu_.gpu().fill(gpu_.handle(), scratch_.data(), 0, scratch_.size());
  rows_ = DeviceBuffer(
      gpu_.gpu(), count * sizeof(SampleRow));  // the last one: its size is what submit() checks
}

void DeviceSampler::release() noexcept {
  for (DeviceBuffer* b : {&rows_, &tokens_, &scratch_}) *b = DeviceBuffer();
}

// Called for slots that no copy uses.
void DeviceSampler::make_room(Slot& slot) {
  if (slot.rows.size() >= rows_.size()) return;
  slot.rows = PinnedBuffer(gpu_.gpu(), rows_.size());
  slot.tokens = PinnedBuffer(gpu_.gpu(), tokens_.size());
}

void DeviceSampler::submit(const Mat& logits, int vocab, const SampleRow* rows, int64_t count) {
  const int most = static_cast<int>(slots_.size());
  if (unread_ == most)
    throw_error(ErrorCode::internal, "sampling: ", unread_, " steps are unread, expected fewer");
  Slot& slot = slots_[(oldest_ + unread_) % most];
  slot.count = count;
  if (count > 0) {
    if (count * sizeof(SampleRow) > rows_.size()) grow(2 * count);
    make_room(slot);
    std::copy_n(rows, count, slot.rows.as<SampleRow>());
    gpu_.gpu().copy(gpu_.handle(), rows_.data(), slot.rows.data(), count * sizeof(SampleRow));
    DeviceSampling s;
    s.logits = static_cast<const float*>(logits.data);
    s.stride = logits.stride;
    s.vocab = vocab;
    s.num_rows = static_cast<int32_t>(count);
    s.rows = rows_.as<SampleRow>();
    s.tokens = tokens_.as<int32_t>();
    s.scratch = scratch_.as<SampleScratch>();
    s.spread = sample_spread(count, vocab, gpu_.gpu().info().multiprocessors);
    s.needs = sample_needs(rows, count);
    sample_cuda(gpu_.kind()).sample(gpu_.handle(), s);
    gpu_.gpu().copy(gpu_.handle(), slot.tokens.data(), tokens_.data(), count * sizeof(int32_t));
  }
  slot.done.record(gpu_.stream());
  ++unread_;
}

void DeviceSampler::read(int32_t* tokens) {
  if (unread_ == 0) throw_error(ErrorCode::internal, "sampling: no step is unread");
  const Slot& slot = slots_[oldest_];
  slot.done.synchronize();
  std::copy_n(slot.tokens.as<int32_t>(), slot.count, tokens);
  oldest_ = (oldest_ + 1) % static_cast<int>(slots_.size());
  --unread_;
}

}  // namespace turbomind
