// A group of ranks for drivers of their exchanges: on a GPU each, in a stream each of one GPU, or
// one after another in one stream. Each rank has two buffers of parts, which hold what a copy in
// the rank's stream brings there.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cuda/dispatch.h"
#include "ops/norm_kernels.h"
#include "ops/rank_sum_cuda.h"
#include "tests/cuda/driver_gpu.h"
#include "tests/cuda/gpu_array.h"

namespace turbomind {

TM_GPU_TABLE(NormCuda, kNormCuda, norm_cuda)
TM_GPU_TABLE(RankSumCuda, kRankSumCuda, rank_sum_cuda)

// Where the ranks run, and the memory of their parts and counters: that of the GPU or, where the
// name says so, of the host.
enum class Place { peers, pinned, streams, pinned_streams, one_stream };

constexpr const char* place_name(Place place) {
  constexpr const char* kNames[] = {"peers", "peers, pinned memory", "streams of one GPU",
                                    "streams of one GPU, pinned memory", "one stream"};
  return kNames[static_cast<int>(place)];
}
constexpr bool is_pinned(Place place) {
  return place == Place::pinned || place == Place::pinned_streams;
}
constexpr bool has_gpus(Place place) {  // one for each rank
  return place == Place::peers || place == Place::pinned;
}

struct TestRank {
  TestRank(Gpu& g, const GpuStream& s, bool pinned, size_t floats)
      : gpu(g), stream(s), base(g, 256), base_source(g, 256) {
    const size_t bytes = floats * sizeof(float) + 256;
    if (pinned)
      pinned_memory = PinnedBuffer(g, 2 * bytes + 256);
    else
      device_memory = DeviceBuffer(g, 2 * bytes + 256);
    uint8_t* const p = pinned ? pinned_memory.data() : device_memory.data();
    counter = reinterpret_cast<uint32_t*>(p);
    parts[0] = reinterpret_cast<float*>(p + 256);
    parts[1] = reinterpret_cast<float*>(p + 256 + (bytes + 255) / 256 * 256);
  }

  // The copies run in the stream's order: `from` is pinned and stays until they have.
  void copy(void* to, const void* from, size_t bytes) const {
    gpu.copy(stream.handle(), to, from, bytes);
  }
  void set_base(uint32_t value) const {
    stream.synchronize();
    *base_source.as<uint32_t>() = value;
    copy(base.data(), base_source.data(), sizeof value);
  }

  Gpu& gpu;
  const GpuStream& stream;
  DeviceBuffer device_memory;
  PinnedBuffer pinned_memory;
  uint32_t* counter;
  float* parts[2];
  const DeviceBuffer base;
  const PinnedBuffer base_source;
};

// Pinned memory with these values, for copies in a stream.
template <typename T>
PinnedBuffer pinned(Gpu& gpu, const std::vector<T>& values) {
  PinnedBuffer buffer(gpu, values.size() * sizeof(T));
  std::memcpy(buffer.data(), values.data(), values.size() * sizeof(T));
  return buffer;
}

class TestRanks {
 public:
  // Room for `floats` in each buffer of parts.
  TestRanks(int ranks, Place place, size_t floats) : place_(place) {
    const int gpus = has_gpus(place) ? ranks : 1;
    const int streams = place == Place::one_stream ? 1 : ranks;
    for (int g = 0; g < gpus; ++g) gpus_.push_back(open_gpu(kind(), g));
    for (int s = 0; s < streams; ++s) streams_.emplace_back(*gpus_[s % gpus]);
    for (const auto& gpu : gpus_) {
      gpu->set_overlap(false);
      for (const auto& other : gpus_) gpu->enable_access(*other);
    }
    words_ = PinnedBuffer(*gpus_[0], 256);
    std::fill_n(words_.as<uint32_t>(), 64, 0u);
    for (int r = 0; r < ranks; ++r) {
      ranks_.push_back(std::make_unique<TestRank>(*gpus_[r % gpus], streams_[r % streams],
                                                  is_pinned(place), floats));
    }
    set_counters(0);
  }
  TestRanks(const TestRanks&) = delete;
  TestRanks& operator=(const TestRanks&) = delete;

  int size() const { return static_cast<int>(ranks_.size()); }
  TestRank& operator[](int r) { return *ranks_[r]; }
  GpuKind gpu_kind() const { return gpus_[0]->kind(); }
  uint32_t& stop() const { return words_.as<uint32_t>()[0]; }
  uint32_t& missing(int r) const { return words_.as<uint32_t>()[1 + r]; }

  // Sets all counters, and the base of the next step.
  void set_counters(uint32_t value) {
    for (const auto& rank : ranks_) {
      rank->set_base(value);
      rank->copy(rank->counter, rank->base_source.data(), sizeof value);
    }
    synchronize();
  }
  void set_base(uint32_t value) {
    for (const auto& rank : ranks_) rank->set_base(value);
  }
  void synchronize() const {
    for (const GpuStream& stream : streams_) stream.synchronize();
  }

  DeviceExchange exchange(int r, uint32_t number) const {
    DeviceExchange e;
    e.ranks = size();
    e.own = r;
    e.waits = place_ != Place::one_stream;
    e.number = number;
    e.limit_ns = 2'000'000'000;
    e.most_waiting = has_gpus(place_) ? 0 : 64;
    if (!e.waits) return e;
    for (int i = 0; i < size(); ++i) e.counters[i] = ranks_[i]->counter;
    e.base = ranks_[r]->base.as<uint32_t>();
    e.stop = &stop();
    e.missing = &missing(r);
    return e;
  }

  void sum(int r, const DeviceRankSum& s) {
    ranks_[r]->gpu.make_current();
    rank_sum_cuda(gpu_kind()).sum(ranks_[r]->stream.handle(), s);
  }
  void columns(int r, const DeviceRankColumns& c) {
    ranks_[r]->gpu.make_current();
    rank_sum_cuda(gpu_kind()).columns(ranks_[r]->stream.handle(), c);
  }
  void meet(int r, const DeviceExchange& e) {
    ranks_[r]->gpu.make_current();
    rank_sum_cuda(gpu_kind()).meet(ranks_[r]->stream.handle(), e);
  }
  void norm(int r, const DeviceNorm& n) {
    ranks_[r]->gpu.make_current();
    norm_cuda(gpu_kind()).rms_norm(ranks_[r]->stream.handle(), n);
  }

 private:
  const Place place_;
  std::vector<std::unique_ptr<Gpu>> gpus_;
  std::vector<GpuStream> streams_;
  PinnedBuffer words_;
  std::vector<std::unique_ptr<TestRank>> ranks_;
};

}  // namespace turbomind
