#include "model/device_sampler.h"

#include <algorithm>
#include <cstring>

#include "cuda/dispatch.h"

namespace turbomind {

TM_GPU_TABLE(SampleCuda, kSampleCuda, sample_cuda)

void DeviceSampler::reserve(int64_t count) {
  const size_t row_bytes = count * sizeof(DeviceSampleRow), token_bytes = count * sizeof(int32_t);
  rows_ = DeviceBuffer(gpu_.gpu(), row_bytes);
  tokens_ = DeviceBuffer(gpu_.gpu(), token_bytes);
  host_rows_ = PinnedBuffer(gpu_.gpu(), row_bytes);
  host_tokens_ = PinnedBuffer(gpu_.gpu(), token_bytes);
}

void DeviceSampler::sample(const Mat& logits, int vocab, const DeviceSampleRow* rows, int64_t count,
                           int32_t* tokens) {
  const size_t row_bytes = count * sizeof(DeviceSampleRow), token_bytes = count * sizeof(int32_t);
  if (row_bytes > rows_.size()) reserve(2 * count);
  auto* jobs = host_rows_.as<DeviceSampleRow>();
  std::copy_n(rows, count, jobs);
  for (int64_t i = 0; i < count; ++i) jobs[i].out = static_cast<int32_t>(i);
  gpu_.gpu().copy(gpu_.handle(), rows_.data(), jobs, row_bytes);
  DeviceSampling s;
  s.logits = static_cast<const float*>(logits.data);
  s.stride = logits.stride;
  s.vocab = vocab;
  s.num_rows = static_cast<int32_t>(count);
  s.rows = rows_.as<DeviceSampleRow>();
  s.tokens = tokens_.as<int32_t>();
  sample_cuda(gpu_.kind()).sample(gpu_.handle(), s);
  gpu_.gpu().copy(gpu_.handle(), host_tokens_.data(), tokens_.data(), token_bytes);
  gpu_.stream().synchronize();
  for (int64_t i = 0; i < count; ++i) tokens[rows[i].out] = host_tokens_.as<int32_t>()[i];
}

}  // namespace turbomind
