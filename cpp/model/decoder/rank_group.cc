#include "model/decoder/rank_group.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "model/parallel/cut.h"
#include "model/parallel/group_pages.h"

namespace turbomind {

namespace {

using Ranks = std::vector<std::unique_ptr<Model>>;

std::vector<PageIo*> pages_of(const Ranks& ranks) {
  std::vector<PageIo*> pages;
  for (const auto& rank : ranks) pages.push_back(&rank->pages());
  return pages;
}

class HostRankGroup final : public RankGroup {
 public:
  HostRankGroup(Ranks ranks, std::unique_ptr<RankExchange> exchange)
      : RankGroup(std::move(ranks)), exchange_(std::move(exchange)) {}

  // Every rank writes its columns of the logits. Where one fails the others are released, and the
  // step fails.
  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    if (cancel && cancel->requested()) return false;
    exchange_->begin_step();
    bool done = true;  // as rank 0 says, and so all
    run(
        [&](int r) {
          const bool complete = rank(r).forward(batch, logits, r == 0 ? cancel : nullptr);
          if (r == 0) done = complete;
        },
        [&] { exchange_->fail(); });
    return done;
  }

 private:
  const std::unique_ptr<RankExchange> exchange_;
};

}  // namespace

RankGroup::RankGroup(Ranks ranks)
    : ranks_(std::move(ranks)),
      threads_(size()),
      errors_(ranks_.size()),
      pages_(std::make_unique<GroupPages>(pages_of(ranks_))),
      groups_(first().groups()),
      numerics_fingerprint_(first().numerics_fingerprint() + "/tp" + std::to_string(size())) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    groups_[g].page_bytes = 0;
    for (const auto& rank : ranks_) groups_[g].page_bytes += rank->groups()[g].page_bytes;
  }
  memory_.shared_weights = first().memory().shared_weights;
  for (const auto& rank : ranks_) memory_.ranks.push_back(rank->memory().ranks[0]);
}

std::vector<Context*> RankGroup::contexts() {
  std::vector<Context*> contexts;
  for (const auto& rank : ranks_) contexts.push_back(&rank->context());
  return contexts;
}

void RankGroup::reserve(const StepLimits& most) {
  for (const auto& rank : ranks_) rank->reserve(most);
}

void RankGroup::release() noexcept {
  for (const auto& rank : ranks_) rank->release();
}

std::unique_ptr<Model> make_rank_group(const ModelConfig& whole,
                                       std::vector<std::unique_ptr<DecoderResources>> resources,
                                       std::vector<DecoderWeights> weights) {
  const int count = static_cast<int>(weights.size());
  auto exchange = std::make_unique<RankExchange>(count);
  Ranks ranks;
  for (int r = 0; r < count; ++r)
    ranks.push_back(make_decoder(config_of(whole, {r, count}), std::move(resources[r]),
                                 std::move(weights[r]), {exchange.get(), nullptr, r}));
  return join_ranks(std::move(ranks), std::move(exchange));
}

std::unique_ptr<Model> join_ranks(std::vector<std::unique_ptr<Model>> ranks,
                                  std::unique_ptr<RankExchange> exchange) {
  return std::make_unique<HostRankGroup>(std::move(ranks), std::move(exchange));
}

}  // namespace turbomind
