#include "model/device/device_pages.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "cache/page_copy_cuda.h"
#include "cuda/gpu_context.h"

namespace turbomind {

namespace {

constexpr int kBatch = 8;  // pages that are waited for at once

// One group's pages, which have all heads of the model or those of one rank.
struct Group {
  size_t page_bytes = 0;
  int64_t token_bytes = 0;         // of a page
  int64_t stored_token_bytes = 0;  // of a payload
  bool whole = true;               // payloads have the heads of a page and no others
  std::vector<PageLayerCuda> layers;
  DeviceBuffer device_layers;
  DeviceBuffer pages;
};

bool is_whole(const std::vector<KvLayout>& layouts) {
  return std::all_of(layouts.begin(), layouts.end(), [](const KvLayout& l) {
    return l.stored_heads() == l.kv_heads && l.slice.reads;
  });
}

// A stream and staging memory, used by one thread at a time.
struct Lane {
  explicit Lane(Gpu& gpu) : stream(gpu) {}
  // Pinned memory of so many bytes; what it held is gone. `likely` bytes are had at once, for
  // giving pinned memory back may wait for the device.
  uint8_t* staging(size_t bytes, size_t likely) {
    if (staged.size() < bytes) staged = PinnedBuffer(stream.gpu(), std::max(bytes, likely));
    return staged.data();
  }
  GpuStream stream;
  PinnedBuffer staged;
};

class DevicePages final : public DecoderPages {
 public:
  DevicePages(GpuContext& gpu, const CachePlan& plan)
      : gpu_(gpu), groups_(plan.groups.size()), copied_(gpu.gpu()) {
    const LaneUse lane(*this);
    for (size_t g = 0; g < groups_.size(); ++g) {
      Group& group = groups_[g];
      group.page_bytes = plan.groups[g].page_bytes;
      const std::vector<KvLayout> layouts = layouts_of(plan, static_cast<int>(g));
      group.whole = is_whole(layouts);
      group.layers = page_layers_cuda(layouts);
      group.token_bytes = page_token_bytes(group.layers);
      group.stored_token_bytes = stored_token_bytes(group.layers);
      largest_ = std::max(largest_, stored_page_bytes(static_cast<int>(g), kPageTokens));
      const size_t bytes = group.layers.size() * sizeof(PageLayerCuda);
      group.device_layers = DeviceBuffer(gpu.gpu(), bytes);
      gpu.gpu().copy(lane->stream.handle(), group.device_layers.data(), group.layers.data(), bytes);
    }
    lane->stream.synchronize();
  }

  void allocate_pages(const std::vector<int64_t>& pages) override {
    for (size_t g = 0; g < groups_.size(); ++g) {
      const int64_t count = pages.empty() ? 0 : pages[g];
      groups_[g].pages =
          DeviceBuffer(gpu_.gpu(), static_cast<size_t>(count) * groups_[g].page_bytes);
    }
  }
  PageView view(int group) const override {
    return {groups_[group].pages.data(), groups_[group].page_bytes};
  }
  void copy_page(int group, int32_t src, int32_t dst) override {
    gpu_.gpu().make_current();  // may be the thread's first use of the GPU, after pages were loaded
    copy_pages(gpu_.kind(), gpu_.handle(), groups_[group].pages.data(),
               static_cast<int64_t>(groups_[group].page_bytes), &src, &dst, 1);
    std::lock_guard lock(mutex_);
    copied_.record(gpu_.stream());
  }
  size_t stored_page_bytes(int group, int count) const override {
    return static_cast<size_t>(count * groups_[group].stored_token_bytes);
  }

  void read_page(int group, int32_t page, int count, uint8_t* out) const override {
    const size_t bytes = stored_page_bytes(group, count);
    const LaneUse lane(*this);
    uint8_t* const staged = lane->staging(bytes, largest_);
    submit({group, page, count, count, {{staged, bytes}}}, lane->stream.handle(), false);
    lane->stream.synchronize();
    copy_read_heads(groups_[group].layers, count, staged, out);
  }
  void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) override {
    const size_t bytes = stored_page_bytes(group, stored);
    const LaneUse lane(*this);
    uint8_t* const staged = lane->staging(bytes, largest_);
    std::memcpy(staged, in, bytes);
    wait_for_copies(*lane);
    submit({group, page, count, stored, {{staged, bytes}}}, lane->stream.handle(), true);
    lane->stream.synchronize();
  }

  int page_batch() const override { return kBatch; }
  HostMemory host_memory() const override { return gpu_.host_memory(); }
  void read_pages(const std::vector<PageTransfer>& transfers) const override {
    submit_reads(transfers)->wait();
  }
  void write_pages(const std::vector<PageTransfer>& transfers) override {
    submit_writes(transfers)->wait();
  }
  std::unique_ptr<PageCopies> submit_reads(
      const std::vector<PageTransfer>& transfers) const override {
    auto copies = std::make_unique<Copies>(*this);
    for (const PageTransfer& t : transfers) submit(t, copies->lane->stream.handle(), false);
    return copies;
  }
  std::unique_ptr<PageCopies> submit_writes(const std::vector<PageTransfer>& transfers) override {
    auto copies = std::make_unique<Copies>(*this);
    wait_for_copies(*copies->lane);
    for (const PageTransfer& t : transfers) submit(t, copies->lane->stream.handle(), true);
    return copies;
  }

 private:
  // A page may be given away while a copy of it has still to be made before the next step.
  void wait_for_copies(const Lane& lane) const {
    std::lock_guard lock(mutex_);
    gpu_.gpu().wait(lane.stream.handle(), copied_.handle());
  }

  // A full page is stored as it lies in memory, unless it has the heads of one rank alone. Others
  // are moved by a kernel, head by head.
  void submit(const PageTransfer& t, StreamHandle stream, bool to_page) const {
    const Group& group = groups_[t.group];
    uint8_t* page = group.pages.data() + static_cast<size_t>(t.page) * group.page_bytes;
    if (t.count < kPageTokens || !group.whole) {
      gpu_.gpu().make_current();
      const PageTokensCuda job{page,
                               group.device_layers.as<PageLayerCuda>(),
                               static_cast<int>(group.layers.size()),
                               t.stored,
                               t.count,
                               group.token_bytes,
                               group.stored_token_bytes};
      return (to_page ? write_page_tokens : read_page_tokens)(gpu_.kind(), stream, job, t.parts);
    }
    for (const PayloadPart& part : t.parts) {
      if (to_page)
        gpu_.gpu().copy(stream, page, part.data, part.bytes);
      else
        gpu_.gpu().copy(stream, part.data, page, part.bytes);
      page += part.bytes;
    }
  }

  // A lane for as long as this lives: there are as many as threads have copied at a time.
  class LaneUse {
   public:
    explicit LaneUse(const DevicePages& io) : io_(io) {
      std::lock_guard lock(io_.mutex_);
      if (io_.idle_.empty()) {
        lane_ = std::make_unique<Lane>(io_.gpu_.gpu());
        io_.idle_.reserve(++io_.lanes_);
      } else {
        lane_ = std::move(io_.idle_.back());
        io_.idle_.pop_back();
      }
    }
    // After an error in the middle of a batch, the copies before it still use memory that the
    // caller is about to free.
    ~LaneUse() {
      try {
        lane_->stream.synchronize();
      } catch (...) {  // the next copy with this lane reports it
      }
      std::lock_guard lock(io_.mutex_);
      io_.idle_.push_back(std::move(lane_));  // there is room
    }
    LaneUse(const LaneUse&) = delete;
    LaneUse& operator=(const LaneUse&) = delete;
    Lane& operator*() const { return *lane_; }
    Lane* operator->() const { return lane_.get(); }

   private:
    const DevicePages& io_;
    std::unique_ptr<Lane> lane_;
  };

  // Submitted copies, in the order of their lane.
  struct Copies final : PageCopies {
    explicit Copies(const DevicePages& io) : lane(io) {}
    void wait() override { lane->stream.synchronize(); }
    const LaneUse lane;
  };

  GpuContext& gpu_;
  std::vector<Group> groups_;
  size_t largest_ = 0;  // payload, bytes
  mutable std::mutex mutex_;
  const GpuEvent copied_;  // recorded after the last copy of a page
  mutable std::vector<std::unique_ptr<Lane>> idle_;
  mutable size_t lanes_ = 0;
};

}  // namespace

std::unique_ptr<DecoderPages> make_device_pages(GpuContext& gpu, const CachePlan& plan) {
  return std::make_unique<DevicePages>(gpu, plan);
}

}  // namespace turbomind
