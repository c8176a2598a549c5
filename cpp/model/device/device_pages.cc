#include "model/device/device_pages.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "cache/page_copy_cuda.h"
#include "cuda/gpu_context.h"
#include "model/device/local_payload.h"

namespace turbomind {

namespace {

constexpr int kBatch = 8;  // pages that are waited for at once

// Layers as the copies read them.
struct LayerTable {
  LayerTable() = default;
  LayerTable(Gpu& gpu, const std::vector<KvLayout>& layouts)
      : layers(page_layers_cuda(layouts)), device(gpu, bytes()) {}
  size_t bytes() const { return layers.size() * sizeof(PageLayerCuda); }

  std::vector<PageLayerCuda> layers;
  DeviceBuffer device;
};

// One group's pages, which have all heads of the model or those of one rank.
struct Group {
  size_t page_bytes = 0;
  int64_t token_bytes = 0;  // of a page
  int64_t stored_token_bytes = 0;
  bool whole = true;  // stored pages have the heads of a page and no others
  LayerTable stored;
  LayerTable local;  // as if the model had no other heads
  DeviceBuffer pages;
};

std::vector<KvLayout> without_slices(std::vector<KvLayout> layouts) {
  for (KvLayout& layout : layouts) layout.slice = {};
  return layouts;
}

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
      largest_ = std::max(largest_, group.page_bytes);
      const std::vector<KvLayout> layouts = layouts_of(plan, static_cast<int>(g));
      group.whole = is_whole(layouts);
      group.stored = LayerTable(gpu.gpu(), layouts);
      group.local = LayerTable(gpu.gpu(), without_slices(layouts));
      group.token_bytes = page_token_bytes(group.stored.layers);
      group.stored_token_bytes = stored_token_bytes(group.stored.layers);
      for (const LayerTable* table : {&group.stored, &group.local})
        gpu.gpu().copy(lane->stream.handle(), table->device.data(), table->layers.data(),
                       table->bytes());
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
    Copies(*this, {{group, page, count, count, {{out, bytes}}}}, false, false).wait();
  }
  void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) override {
    const PayloadPart payload{const_cast<uint8_t*>(in), stored_page_bytes(group, stored)};
    Copies(*this, {{group, page, count, stored, {payload}}}, true, false).wait();
  }

  int page_batch() const override { return kBatch; }
  HostMemory host_memory() const override { return gpu_.host_memory(); }
  void read_pages(const std::vector<PageTransfer>& transfers) const override {
    Copies(*this, transfers, false, true).wait();
  }
  void write_pages(const std::vector<PageTransfer>& transfers) override {
    Copies(*this, transfers, true, true).wait();
  }
  std::unique_ptr<PageCopies> submit_reads(
      const std::vector<PageTransfer>& transfers) const override {
    return std::make_unique<Copies>(*this, transfers, false, true);
  }
  std::unique_ptr<PageCopies> submit_writes(const std::vector<PageTransfer>& transfers) override {
    return std::make_unique<Copies>(*this, transfers, true, true);
  }

 private:
  // A page may be given away while a copy of it has still to be made before the next step.
  void wait_for_copies(const Lane& lane) const {
    std::lock_guard lock(mutex_);
    gpu_.gpu().wait(lane.stream.handle(), copied_.handle());
  }

  // Returns whether the page can be copied straight from and to pinned parts. Full pages with all
  // heads are stored as they lie in memory. A kernel moves the others, between two places.
  bool direct(const PageTransfer& t) const {
    return t.parts.size() == 1 || (full(t) && groups_[t.group].whole);
  }
  static bool full(const PageTransfer& t) { return t.count == kPageTokens; }

  uint8_t* page_of(const PageTransfer& t) const {
    const Group& group = groups_[t.group];
    return group.pages.data() + static_cast<size_t>(t.page) * group.page_bytes;
  }

  // Copies a full page as it lies in memory.
  void submit_full(const PageTransfer& t, const std::vector<PayloadPart>& parts,
                   StreamHandle stream, bool to_page) const {
    uint8_t* page = page_of(t);
    for (const PayloadPart& part : parts) {
      if (to_page)
        gpu_.gpu().copy(stream, page, part.data, part.bytes);
      else
        gpu_.gpu().copy(stream, part.data, page, part.bytes);
      page += part.bytes;
    }
  }
  void submit_tokens(const PageTransfer& t, uint8_t* plain, const LayerTable& table,
                     StreamHandle stream, bool to_page) const {
    gpu_.gpu().make_current();
    const PageTokensCuda job{page_of(t),
                             plain,
                             table.device.as<PageLayerCuda>(),
                             static_cast<int>(table.layers.size()),
                             t.stored,
                             t.count,
                             groups_[t.group].token_bytes};
    (to_page ? write_page_tokens : read_page_tokens)(gpu_.kind(), stream, job);
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

  // Submitted copies and their lane. Those that are not direct pass through the lane's memory.
  class Copies final : public PageCopies {
   public:
    // `pinned`: the parts are.
    Copies(const DevicePages& io, const std::vector<PageTransfer>& transfers, bool to_page,
           bool pinned)
        : io_(io), lane_(io), to_page_(to_page) {
      if (to_page) io.wait_for_copies(*lane_);
      const auto direct = [&](const PageTransfer& t) { return pinned && io.direct(t); };
      size_t bytes = 0;
      for (const PageTransfer& t : transfers)
        if (!direct(t)) bytes += local_bytes(t);
      uint8_t* staged = bytes > 0 ? lane_->staging(bytes, io.largest_) : nullptr;
      for (const PageTransfer& t : transfers) {
        if (direct(t)) {
          submit(t);
        } else {
          submit_staged(t, staged);
          staged += local_bytes(t);
        }
      }
    }
    void wait() override {
      lane_->stream.synchronize();
      if (to_page_) return;
      for (const LocalPayload& payload : staged_) payload.scatter();
    }

   private:
    size_t local_bytes(const PageTransfer& t) const {
      return static_cast<size_t>(t.stored * io_.groups_[t.group].token_bytes);
    }
    void submit(const PageTransfer& t) {
      const Group& group = io_.groups_[t.group];
      if (full(t) && group.whole)
        io_.submit_full(t, t.parts, lane_->stream.handle(), to_page_);
      else
        io_.submit_tokens(t, t.parts[0].data, group.stored, lane_->stream.handle(), to_page_);
    }
    void submit_staged(const PageTransfer& t, uint8_t* data) {
      const Group& group = io_.groups_[t.group];
      staged_.push_back({group.stored.layers, t, data});
      if (to_page_) staged_.back().gather();
      if (full(t))
        io_.submit_full(t, {{data, local_bytes(t)}}, lane_->stream.handle(), to_page_);
      else
        io_.submit_tokens(t, data, group.local, lane_->stream.handle(), to_page_);
    }

    const DevicePages& io_;
    const LaneUse lane_;
    const bool to_page_;
    std::vector<LocalPayload> staged_;
  };

  GpuContext& gpu_;
  std::vector<Group> groups_;
  size_t largest_ = 0;  // page, bytes
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
