#include "model/parallel/rank_group.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "model/parallel/cut.h"
#include "model/parallel/group_pages.h"

namespace turbomind {

namespace {

using Ranks = std::vector<std::unique_ptr<Model>>;

class RankGroup final : public Model {
 public:
  RankGroup(Ranks ranks, std::unique_ptr<RankExchange> exchange)
      : exchange_(std::move(exchange)),
        ranks_(std::move(ranks)),
        threads_(static_cast<int>(ranks_.size())),
        errors_(ranks_.size()),
        pages_(ranks_),
        groups_(first().groups()),
        numerics_fingerprint_(first().numerics_fingerprint() + "/tp" +
                              std::to_string(ranks_.size())) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      groups_[g].page_bytes = 0;
      for (const auto& rank : ranks_) groups_[g].page_bytes += rank->groups()[g].page_bytes;
    }
    memory_.shared_weights = first().memory().shared_weights;
    for (const auto& rank : ranks_) memory_.ranks.push_back(rank->memory().ranks[0]);
  }

  int vocab() const override { return first().vocab(); }
  int max_context() const override { return first().max_context(); }
  const std::string& fingerprint() const override { return first().fingerprint(); }
  const std::vector<CacheGroup>& groups() const override { return groups_; }
  const ModelMemory& memory() const override { return memory_; }
  const std::string& numerics_fingerprint() const override { return numerics_fingerprint_; }
  Context& context() override { return ranks_[0]->context(); }
  std::vector<Profiler*> profilers() override {
    std::vector<Profiler*> profilers;
    for (const auto& rank : ranks_) profilers.push_back(&rank->context().profiler);
    return profilers;
  }
  PageIo& pages() override { return pages_; }

  void reserve(const StepLimits& most) override {
    for (const auto& rank : ranks_) rank->reserve(most);
  }
  void release() noexcept override {
    for (const auto& rank : ranks_) rank->release();
  }

  // Every rank writes its columns of the logits. Where one fails the others are released, and the
  // step fails with the error of the first rank that has one.
  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    if (cancel && cancel->requested()) return false;
    exchange_->begin_step();
    bool done = true;  // as rank 0 says, and so all
    std::fill(errors_.begin(), errors_.end(), nullptr);
    threads_.run([&](int rank) {
      try {
        const bool complete = ranks_[rank]->forward(batch, logits, rank == 0 ? cancel : nullptr);
        if (rank == 0) done = complete;
      } catch (const RankReleased&) {
      } catch (...) {
        errors_[rank] = std::current_exception();
        exchange_->fail();
      }
    });
    for (const std::exception_ptr& error : errors_)
      if (error) std::rethrow_exception(error);
    return done;
  }

 private:
  const Model& first() const { return *ranks_[0]; }

  const std::unique_ptr<RankExchange> exchange_;
  const Ranks ranks_;
  ThreadPool threads_;  // has no Step of its own: the pools of the ranks count their threads
  std::vector<std::exception_ptr> errors_;  // of the step, by rank
  GroupPages pages_;
  std::vector<CacheGroup> groups_;
  ModelMemory memory_;
  const std::string numerics_fingerprint_;
};

}  // namespace

std::unique_ptr<Model> make_rank_group(const ModelConfig& whole,
                                       std::vector<std::unique_ptr<DecoderResources>> resources,
                                       std::vector<DecoderWeights> weights) {
  const int count = static_cast<int>(weights.size());
  auto exchange = std::make_unique<RankExchange>(count);
  Ranks ranks;
  for (int r = 0; r < count; ++r)
    ranks.push_back(make_decoder(config_of(whole, {r, count}), std::move(resources[r]),
                                 std::move(weights[r]), {exchange.get(), r}));
  return join_ranks(std::move(ranks), std::move(exchange));
}

std::unique_ptr<Model> join_ranks(std::vector<std::unique_ptr<Model>> ranks,
                                  std::unique_ptr<RankExchange> exchange) {
  return std::make_unique<RankGroup>(std::move(ranks), std::move(exchange));
}

}  // namespace turbomind
