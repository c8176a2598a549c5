// A model's pages: their memory, copies between them, and the way to and from the stored order.
#pragma once

#include <memory>
#include <vector>

#include "cache/page_transfer.h"
#include "core/context.h"
#include "core/memory.h"
#include "model/config.h"
#include "ops/attention.h"

namespace turbomind {

// What Model says of its pages (model/model.h), for one kind of device.
class PageIo {
 public:
  virtual ~PageIo() = default;
  virtual void allocate(int64_t pages) = 0;
  virtual void prepare(int64_t) {}  // a GPU gives memory out whole
  virtual PageView view(int group) const = 0;
  virtual void copy(int group, int32_t src, int32_t dst) = 0;
  virtual size_t stored_bytes(int group, int count) const = 0;
  virtual void read(int group, int32_t page, int count, uint8_t* out) const = 0;
  virtual void write(int group, int32_t page, int count, const uint8_t* in, int stored) = 0;
  virtual int batch() const { return 1; }
  // Where batch() is above 1.
  virtual void read_all(const std::vector<PageTransfer>&) const {}
  virtual void write_all(const std::vector<PageTransfer>&) {}
  virtual HostMemory host_memory() const { return plain_memory(); }
};

// `plan` stays alive.
std::unique_ptr<PageIo> make_page_io(Context& ctx, const CachePlan& plan);
std::unique_ptr<PageIo> make_device_page_io(GpuContext& gpu, const CachePlan& plan);

}  // namespace turbomind
