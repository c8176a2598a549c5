#include "model/page_io.h"

#include <cstring>

#include "cache/page_codec.h"
#include "core/memory.h"

namespace turbomind {

namespace {

std::vector<PageCodec> make_codecs(const CachePlan& plan) {
  std::vector<std::vector<KvLayout>> layouts(plan.groups.size());
  for (size_t i = 0; i < plan.layout_of_layer.size(); ++i)
    layouts[plan.group_of_layer[i]].push_back(plan.layout_of_layer[i]);
  return {layouts.begin(), layouts.end()};
}

class HostPageIo final : public PageIo {
 public:
  explicit HostPageIo(const CachePlan& plan)
      : plan_(plan), pages_(plan.groups.size()), codecs_(make_codecs(plan)) {}

  void allocate(int64_t pages) override {
    for (size_t g = 0; g < pages_.size(); ++g)
      pages_[g] = HugeBuffer(static_cast<size_t>(pages) * plan_.groups[g].page_bytes);
  }
  void prepare(int64_t pages) override {
    for (size_t g = 0; g < pages_.size(); ++g)
      pages_[g].populate(static_cast<size_t>(pages) * plan_.groups[g].page_bytes);
  }
  PageView view(int group) const override {
    return {pages_[group].data(), plan_.groups[group].page_bytes};
  }
  void copy(int group, int32_t src, int32_t dst) override {
    std::memcpy(page(group, dst), page(group, src), plan_.groups[group].page_bytes);
  }
  size_t stored_bytes(int group, int count) const override { return codecs_[group].bytes(count); }
  void read(int group, int32_t at, int count, uint8_t* out) const override {
    codecs_[group].read(page(group, at), count, out);
  }
  void write(int group, int32_t at, int count, const uint8_t* in, int stored) override {
    codecs_[group].write(page(group, at), count, in, stored);
  }

 private:
  uint8_t* page(int group, int32_t at) const {
    return pages_[group].data() + static_cast<size_t>(at) * plan_.groups[group].page_bytes;
  }

  const CachePlan& plan_;
  std::vector<HugeBuffer> pages_;
  const std::vector<PageCodec> codecs_;  // per group
};

}  // namespace

std::unique_ptr<PageIo> make_page_io(Context& ctx, const CachePlan& plan) {
  if (ctx.gpu) return make_device_page_io(*ctx.gpu, plan);
  return std::make_unique<HostPageIo>(plan);
}

}  // namespace turbomind
