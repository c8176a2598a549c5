#include "model/parallel/group_pages.h"

namespace turbomind {

GroupPages::GroupPages(const std::vector<std::unique_ptr<Model>>& ranks) {
  for (const auto& rank : ranks) ranks_.push_back(&rank->pages());
}

void GroupPages::allocate_pages(const std::vector<int64_t>& pages) {
  for (PageIo* rank : ranks_) rank->allocate_pages(pages);
}

void GroupPages::prepare_pages(int64_t pages) {
  for (PageIo* rank : ranks_) rank->prepare_pages(pages);
}

void GroupPages::copy_page(int group, int32_t src, int32_t dst) {
  for (PageIo* rank : ranks_) rank->copy_page(group, src, dst);
}

size_t GroupPages::stored_page_bytes(int group, int count) const {
  return ranks_[0]->stored_page_bytes(group, count);
}

void GroupPages::read_page(int group, int32_t page, int count, uint8_t* out) const {
  for (const PageIo* rank : ranks_) rank->read_page(group, page, count, out);
}

void GroupPages::write_page(int group, int32_t page, int count, const uint8_t* in, int stored) {
  for (PageIo* rank : ranks_) rank->write_page(group, page, count, in, stored);
}

}  // namespace turbomind
