// The pages of a model that is cut over ranks, as one.
#pragma once

#include <memory>
#include <vector>

#include "model/model.h"

namespace turbomind {

// Pages of all ranks under the same ids. A payload is that of the whole model, in which each rank
// reads and writes its heads.
class GroupPages final : public PageIo {
 public:
  explicit GroupPages(const std::vector<std::unique_ptr<Model>>& ranks);  // they stay alive

  void allocate_pages(const std::vector<int64_t>& pages) override;
  void prepare_pages(int64_t pages) override;
  void copy_page(int group, int32_t src, int32_t dst) override;
  size_t stored_page_bytes(int group, int count) const override;
  void read_page(int group, int32_t page, int count, uint8_t* out) const override;
  void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) override;

 private:
  std::vector<PageIo*> ranks_;
};

}  // namespace turbomind
