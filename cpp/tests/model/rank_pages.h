// Pages of a model that is cut over emulated GPUs, and what they are checked with: the PageCodec of
// the whole model, which has no GPU and no ranks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cache/page_codec.h"
#include "cuda/gpu_context.h"
#include "model/device/device_pages.h"
#include "model/parallel/cut.h"
#include "model/parallel/group_pages.h"

namespace turbomind {

using Bytes = std::vector<uint8_t>;

constexpr int kPages = 8;
constexpr uint8_t kUntouched = 0xee;

// Full attention in two layers of different widths and a window, with K wider than V or narrower.
inline ModelConfig make_config(int kv_heads) {
  ModelConfig config;
  config.fingerprint = "small";
  config.hidden = 64;
  config.vocab = 1003;
  config.max_context = 400;
  config.kv_dtype = DType::bf16;
  config.ropes.emplace_back();
  for (int i = 0; i < 4; ++i) config.ropes[0].inv_freq.push_back(std::pow(100.0f, -i / 4.0f));
  for (int i = 0; i < 4; ++i) {
    LayerConfig& layer = config.layers.emplace_back();
    layer.heads = 8;
    layer.kv_heads = kv_heads;
    layer.k_dim = i == 2 ? 16 : 24;
    layer.v_dim = i == 2 ? 40 : 8;
    layer.window = i == 1 ? 70 : 0;
    layer.intermediate = 72;
  }
  return config;
}

inline std::vector<KvLayout> layouts_on_cpu(const ModelConfig& config, int group) {
  return layouts_of(plan_cache(config, true), group);
}

inline Bytes random_bytes(size_t n, uint32_t seed) {
  std::minstd_rand random(seed + 1);
  Bytes bytes(n);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(random() >> 8);
  return bytes;
}

// Returns what a codec reads after it wrote a payload: where it reads nothing, `kUntouched`.
inline Bytes through_codec(const std::vector<KvLayout>& layouts, const Bytes& payload, int count,
                           int stored) {
  const PageCodec codec(layouts);
  Bytes page(layouts.back().offset + layouts.back().layer_bytes());
  codec.write(page.data(), count, payload.data(), stored);
  Bytes out(codec.bytes(count), kUntouched);
  codec.read(page.data(), count, out.data());
  return out;
}

// A payload in pinned memory, cut into pieces that lie apart.
struct Payload {
  std::vector<HostBlock> blocks;
  std::vector<PayloadPart> parts;
  Payload(const PageIo& pages, const Bytes& bytes, int pieces) {
    const HostMemory memory = pages.host_memory();
    const size_t even = (bytes.size() / pieces / 16 + 1) * 16;
    for (size_t at = 0; at < bytes.size(); at += even) {
      const size_t size = std::min(even, bytes.size() - at);
      blocks.push_back(memory.allocate(size));
      std::memcpy(blocks.back().get(), bytes.data() + at, size);
      parts.push_back({blocks.back().get(), size});
    }
  }
  Bytes bytes() const {
    Bytes all;
    for (const PayloadPart& part : parts) all.insert(all.end(), part.data, part.data + part.bytes);
    return all;
  }
};

// The ranks of a model, a GPU each, and their group.
class Ranks {
 public:
  Ranks(const ModelConfig& whole, int count) : name_(std::to_string(count) + " ranks") {
    std::vector<PageIo*> ranks;
    for (int r = 0; r < count; ++r) {
      GpuOptions options;
      options.kind = GpuKind::emulated;
      options.index = r;
      gpus_.push_back(std::make_unique<GpuContext>(options));
      configs_.push_back(count > 1 ? config_of(whole, {r, count}) : whole);
      const CachePlan plan = plan_cache(configs_[r], false);
      groups_ = static_cast<int>(plan.groups.size());
      pages_.push_back(make_device_pages(*gpus_[r], plan));
      ranks.push_back(pages_[r].get());
    }
    group_ = std::make_unique<GroupPages>(ranks);
    group_->allocate_pages(std::vector<int64_t>(groups_, kPages));
  }
  GroupPages& all() { return *group_; }
  DecoderPages& rank(int r) { return *pages_[r]; }
  const ModelConfig& config(int r) const { return configs_[r]; }
  GpuContext& gpu(int r) { return *gpus_[r]; }
  int count() const { return static_cast<int>(pages_.size()); }
  int groups() const { return groups_; }
  std::string name(int kv_heads) const {
    return name_ + ", " + std::to_string(kv_heads) + " KV heads";
  }

 private:
  const std::string name_;
  std::vector<std::unique_ptr<GpuContext>> gpus_;
  std::vector<ModelConfig> configs_;
  std::vector<std::unique_ptr<DecoderPages>> pages_;
  std::unique_ptr<GroupPages> group_;
  int groups_ = 0;
};

struct Case {
  int count, stored, pieces;
};
inline const std::vector<Case> kCases = {{64, 64, 1}, {64, 64, 5}, {13, 13, 1}, {13, 64, 1},
                                         {1, 7, 3},   {63, 64, 4}, {40, 41, 1}};

// A batch of all cases, of one group.
struct Batch {
  Batch(const PageIo& pages, int group, uint32_t seed) {
    for (size_t i = 0; i < kCases.size(); ++i) {
      const auto& [count, stored, pieces] = kCases[i];
      bytes.push_back(random_bytes(pages.stored_page_bytes(group, stored), seed + 31 * i + group));
      in.emplace_back(pages, bytes[i], pieces);
      out.emplace_back(pages, Bytes(pages.stored_page_bytes(group, count), kUntouched), pieces);
      const int32_t page = static_cast<int32_t>(i);
      writes.push_back({group, page, count, stored, in[i].parts});
      reads.push_back({group, page, count, count, out[i].parts});
    }
  }
  // Returns what is wrong with the payloads that were read, by the codec of the layouts.
  std::string fault(const std::vector<KvLayout>& layouts) const {
    for (size_t i = 0; i < kCases.size(); ++i)
      if (out[i].bytes() != through_codec(layouts, bytes[i], kCases[i].count, kCases[i].stored))
        return "case " + std::to_string(i);
    return "";
  }
  std::vector<Bytes> bytes;
  std::vector<Payload> in, out;
  std::vector<PageTransfer> writes, reads;
};

template <typename F>
void for_all_cuts(F f) {
  for (const int kv_heads : {1, 2, 4, 8}) {
    const ModelConfig whole = make_config(kv_heads);
    for (const int count : {1, 2, 4}) {
      Ranks ranks(whole, count);
      for (int group = 0; group < ranks.groups(); ++group)
        f(whole, ranks, group, ranks.name(kv_heads) + ", group " + std::to_string(group));
    }
  }
}

}  // namespace turbomind
