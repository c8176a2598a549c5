// A model cut over ranks that compute each step together: a decoder each, a thread each.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "model/decoder/decoder.h"
#include "model/model.h"
#include "model/parallel/rank_exchange.h"

namespace turbomind {

// What groups have in common. Rank 0 runs on the thread of the caller of forward(), and its context
// is the group's.
class RankGroup : public Model {
 public:
  explicit RankGroup(std::vector<std::unique_ptr<Model>> ranks);

  int vocab() const override { return first().vocab(); }
  int max_context() const override { return first().max_context(); }
  const std::string& fingerprint() const override { return first().fingerprint(); }
  const std::vector<CacheGroup>& groups() const override { return groups_; }
  const ModelMemory& memory() const override { return memory_; }
  const std::string& numerics_fingerprint() const override { return numerics_fingerprint_; }
  Context& context() override { return ranks_[0]->context(); }
  std::vector<Context*> contexts() override;
  PageIo& pages() override { return *pages_; }
  void reserve(const StepLimits& most) override;
  void release() noexcept override;

 protected:
  Model& first() const { return *ranks_[0]; }
  Model& rank(int index) const { return *ranks_[index]; }
  int size() const { return static_cast<int>(ranks_.size()); }

  // Calls step(rank) for all ranks, each on its thread, and on_error() on the thread of one that
  // fails. Throws the error of the first rank that has one of its own.
  template <typename Step, typename OnError>
  void run(Step step, OnError on_error) {
    std::fill(errors_.begin(), errors_.end(), nullptr);
    threads_.run([&](int rank) {
      try {
        step(rank);
      } catch (const RankReleased&) {
      } catch (...) {
        errors_[rank] = std::current_exception();
        on_error();
      }
    });
    for (const std::exception_ptr& error : errors_)
      if (error) std::rethrow_exception(error);
  }

 private:
  const std::vector<std::unique_ptr<Model>> ranks_;
  ThreadPool threads_;  // has no Step of its own: the pools of the ranks count their threads
  std::vector<std::exception_ptr> errors_;  // of the step, by rank
  const std::unique_ptr<PageIo> pages_;
  std::vector<CacheGroup> groups_;
  ModelMemory memory_;
  const std::string numerics_fingerprint_;
};

// Makes the decoders of a model's ranks, two or more, and their group.
std::unique_ptr<Model> make_rank_group(const ModelConfig& whole,
                                       std::vector<std::unique_ptr<DecoderResources>> resources,
                                       std::vector<DecoderWeights> weights);
std::unique_ptr<Model> make_gpu_rank_group(const ModelConfig& whole,
                                           std::vector<std::unique_ptr<DecoderResources>> resources,
                                           std::vector<DecoderWeights> weights);

// Joins ranks on the CPU that are linked by an exchange.
std::unique_ptr<Model> join_ranks(std::vector<std::unique_ptr<Model>> ranks,
                                  std::unique_ptr<RankExchange> exchange);

}  // namespace turbomind
