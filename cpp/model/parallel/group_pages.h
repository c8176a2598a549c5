// The pages of a model's ranks under the same ids. A payload is that of the whole model, in which
// each rank reads and writes its heads.
#pragma once

#include <vector>

#include "cache/page_io.h"

namespace turbomind {

class GroupPages final : public PageIo {
 public:
  explicit GroupPages(std::vector<PageIo*> ranks);  // on one kind of device; they stay alive

  void allocate_pages(const std::vector<int64_t>& pages) override;
  void prepare_pages(int64_t pages) override;
  void copy_page(int group, int32_t src, int32_t dst) override;
  size_t stored_page_bytes(int group, int count) const override;
  void read_page(int group, int32_t page, int count, uint8_t* out) const override;
  void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) override;
  // The ranks copy at the same time.
  void read_pages(const std::vector<PageTransfer>& transfers) const override;
  void write_pages(const std::vector<PageTransfer>& transfers) override;
  int page_batch() const override { return ranks_[0]->page_batch(); }
  // Every GPU copies to and from the pinned memory of any.
  HostMemory host_memory() const override { return ranks_[0]->host_memory(); }

 private:
  void load_kernels(const std::vector<int64_t>& pages);

  const std::vector<PageIo*> ranks_;
};

}  // namespace turbomind
