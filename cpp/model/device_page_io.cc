// Pages in device memory. They are in the order that pages are stored in.
#include <cstring>
#include <mutex>

#include "cache/page_copy_cuda.h"
#include "cuda/gpu_context.h"
#include "model/page_io.h"

namespace turbomind {

namespace {

// One group's pages and what the copies need to know of its layers.
struct Group {
  size_t page_bytes = 0;
  std::vector<PageLayerCuda> layers;
  DeviceBuffer device_layers;
  DeviceBuffer pages;
};

class DevicePageIo final : public PageIo {
 public:
  DevicePageIo(GpuContext& gpu, const CachePlan& plan)
      : gpu_(gpu), stream_(gpu.gpu()), groups_(plan.groups.size()) {
    size_t most = 0;
    for (size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      group.page_bytes = plan.groups[g].page_bytes;
      group.layers = page_layers_cuda(layouts_of(plan, static_cast<int>(g)));
      const size_t bytes = group.layers.size() * sizeof(PageLayerCuda);
      group.device_layers = DeviceBuffer(gpu.gpu(), bytes);
      gpu.gpu().copy(stream_.handle(), group.device_layers.data(), group.layers.data(), bytes);
      most = std::max(most, group.page_bytes);
    }
    staging_ = PinnedBuffer(gpu.gpu(), most);
    stream_.synchronize();
  }

  void allocate(int64_t pages) override {
    for (Group& group : groups_)
      group.pages = DeviceBuffer(gpu_.gpu(), static_cast<size_t>(pages) * group.page_bytes);
  }
  PageView view(int group) const override {
    return {groups_[group].pages.data(), groups_[group].page_bytes};
  }
  void copy(int group, int32_t src, int32_t dst) override {
    copy_pages(gpu_.kind(), gpu_.handle(), groups_[group].pages.data(),
               static_cast<int64_t>(groups_[group].page_bytes), &src, &dst, 1);
  }
  size_t stored_bytes(int group, int count) const override {
    return static_cast<size_t>(count * page_token_bytes(groups_[group].layers));
  }

  // On a stream of their own, so they go on beside a step.
  void read(int group, int32_t page, int count, uint8_t* out) const override {
    std::lock_guard lock(mutex_);
    gpu_.gpu().make_current();
    read_page_tokens(gpu_.kind(), stream_.handle(), job(group, page, count, count));
    stream_.synchronize();
    std::memcpy(out, staging_.data(), stored_bytes(group, count));
  }
  void write(int group, int32_t page, int count, const uint8_t* in, int stored) override {
    std::lock_guard lock(mutex_);
    gpu_.gpu().make_current();
    std::memcpy(staging_.data(), in, stored_bytes(group, stored));
    write_page_tokens(gpu_.kind(), stream_.handle(), job(group, page, count, stored));
    stream_.synchronize();
  }

 private:
  static std::vector<KvLayout> layouts_of(const CachePlan& plan, int group) {
    std::vector<KvLayout> layouts;
    for (size_t i = 0; i < plan.layout_of_layer.size(); ++i)
      if (plan.group_of_layer[i] == group) layouts.push_back(plan.layout_of_layer[i]);
    return layouts;
  }

  PageTokensCuda job(int g, int32_t page, int count, int stored) const {
    const Group& group = groups_[g];
    PageTokensCuda job{};
    job.page = group.pages.data() + static_cast<size_t>(page) * group.page_bytes;
    job.plain = staging_.data();
    job.layers = group.device_layers.as<PageLayerCuda>();
    job.num_layers = static_cast<int>(group.layers.size());
    job.stored = stored;
    job.count = count;
    job.token_bytes = page_token_bytes(group.layers);
    return job;
  }

  GpuContext& gpu_;
  const GpuStream stream_;
  std::vector<Group> groups_;
  PinnedBuffer staging_;      // of one page
  mutable std::mutex mutex_;  // of the stream and the staging memory
};

}  // namespace

std::unique_ptr<PageIo> make_device_page_io(GpuContext& gpu, const CachePlan& plan) {
  return std::make_unique<DevicePageIo>(gpu, plan);
}

}  // namespace turbomind
