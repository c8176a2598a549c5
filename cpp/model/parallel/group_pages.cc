#include "model/parallel/group_pages.h"

#include <memory>
#include <utility>

namespace turbomind {

namespace {

// Calls submit(rank) for all ranks, and then waits for what they have submitted.
template <typename Submit>
void copy_all(const std::vector<PageIo*>& ranks, Submit submit) {
  std::vector<std::unique_ptr<PageCopies>> copies;
  copies.reserve(ranks.size());
  for (PageIo* rank : ranks) copies.push_back(submit(*rank));
  for (const auto& rank : copies)
    if (rank) rank->wait();
}

}  // namespace

GroupPages::GroupPages(std::vector<PageIo*> ranks) : ranks_(std::move(ranks)) {}

void GroupPages::allocate_pages(const std::vector<int64_t>& pages) {
  for (PageIo* rank : ranks_) rank->allocate_pages(pages);
  if (page_batch() > 1) load_kernels(pages);
}

// A GPU may load a kernel at its first launch, and wait for its steps meanwhile, which may wait for
// those of another rank (model/parallel/gpu_exchange.h). So each kernel that moves pages runs
// before the first step: on the first token of a page and back.
void GroupPages::load_kernels(const std::vector<int64_t>& pages) {
  std::vector<uint8_t> token;
  for (size_t g = 0; g < pages.size(); ++g) {
    if (pages[g] == 0) continue;
    const int group = static_cast<int>(g);
    token.resize(stored_page_bytes(group, 1));
    read_page(group, 0, 1, token.data());
    write_page(group, 0, 1, token.data(), 1);
    copy_page(group, 0, 0);
  }
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

// Ranks that take payloads in one piece get it from the group, once for all: they would overwrite
// each other's heads in the parts.
void GroupPages::read_pages(const std::vector<PageTransfer>& transfers) const {
  if (page_batch() == 1) return PageIo::read_pages(transfers);
  copy_all(ranks_, [&](const PageIo& rank) { return rank.submit_reads(transfers); });
}

void GroupPages::write_pages(const std::vector<PageTransfer>& transfers) {
  if (page_batch() == 1) return PageIo::write_pages(transfers);
  copy_all(ranks_, [&](PageIo& rank) { return rank.submit_writes(transfers); });
}

}  // namespace turbomind
