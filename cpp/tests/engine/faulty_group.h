// A group of ranks of which one fails in some steps: before any op or exchange, or where its thread
// allocates memory.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "model/model.h"
#include "model/parallel/rank_exchange.h"
#include "tests/engine/failing_memory.h"

namespace turbomind::fuzz {

struct Fault {
  enum Kind : uint8_t {
    none,
    error,       // the rank throws Error(model) before the op
    memory,      // it throws std::bad_alloc before the op
    allocation,  // a call of operator new fails in or after the op
    mapping,     // a call of mmap() does
  };
  Kind kind = none;
  int rank = 0;
  // Of the rank in the step, exchanges included; -1: what it does before the first one.
  int op = 0;
  int skip = 0;  // allocations or mappings of the rank's thread that succeed before
};

// Watches the ops of a rank, in the place of a device's timer, and the memory of its thread.
class RankWatch final : public DeviceTimer, public MemoryWatch {
 public:
  explicit RankWatch(int rank) : rank_(rank) {}

  // While the rank is in no step.
  void begin_step(const Fault& fault) {
    fault_ = fault.rank == rank_ ? fault : Fault{};
    ops_ = 0;
    fired_ = false;
    armed_ = fault_.op < 0;
  }
  bool fired() const { return fired_; }

  // On the rank's thread.
  void begin_op() {
    memory_watch = this;
    if (ops_++ != fault_.op) return;
    armed_ = true;
    if (fault_.kind != Fault::error && fault_.kind != Fault::memory) return;
    fired_ = true;
    if (fault_.kind == Fault::memory) throw std::bad_alloc();
    throw_error(ErrorCode::model, "rank ", rank_, " fails at op ", fault_.op);
  }
  bool fails(Allocation allocation) override {
    const auto kind = allocation == Allocation::object ? Fault::allocation : Fault::mapping;
    if (!armed_ || fault_.kind != kind || fault_.skip-- > 0) return false;
    armed_ = false;
    fired_ = true;
    return true;
  }
  void begin() override { begin_op(); }
  void end(Op) noexcept override {}
  void collect(OpStats&) override {}

 private:
  const int rank_;
  Fault fault_;  // of the step
  int ops_ = 0;  // in the step
  bool armed_ = false, fired_ = false;
};

// What the steps of a group are to have, and have had.
struct FaultPlan {
  std::function<Fault()> next;             // of the next step
  std::atomic<int64_t> happened{0};        // steps that failed by a fault
  std::atomic<int64_t> without_effect{0};  // steps that did not fail although their fault happened
};

class FaultyGroup final : public Model {
 public:
  // `make` makes a group of `ranks`.
  FaultyGroup(int ranks, const std::function<std::unique_ptr<Model>()>& make,
              std::shared_ptr<FaultPlan> plan)
      : plan_(std::move(plan)) {
    for (int r = 0; r < ranks; ++r) watches_.push_back(std::make_unique<RankWatch>(r));
    RankExchange::test_hook = [this](int rank) { watches_[rank]->begin_op(); };
    group_ = make();
    RankExchange::test_hook = nullptr;
    const std::vector<Context*> contexts = group_->contexts();
    for (int r = 0; r < ranks; ++r) {
      contexts[r]->profiler.device = watches_[r].get();
      contexts[r]->profiler.enabled = true;
    }
  }

  int vocab() const override { return group_->vocab(); }
  int max_context() const override { return group_->max_context(); }
  const std::string& fingerprint() const override { return group_->fingerprint(); }
  const std::vector<CacheGroup>& groups() const override { return group_->groups(); }
  const ModelMemory& memory() const override { return group_->memory(); }
  const std::string& numerics_fingerprint() const override {
    return group_->numerics_fingerprint();
  }
  Context& context() override { return group_->context(); }
  std::vector<Context*> contexts() override { return group_->contexts(); }
  void reserve(const StepLimits& most) override { group_->reserve(most); }
  int64_t free_bytes() const override { return group_->free_bytes(); }
  StepOutputs* outputs() override { return group_->outputs(); }
  PageIo& pages() override { return group_->pages(); }
  void release() noexcept override { group_->release(); }

  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    const Fault fault = plan_->next();
    for (const auto& watch : watches_) watch->begin_step(fault);
    memory_watch = watches_[0].get();
    try {
      const bool done = group_->forward(batch, logits, cancel);
      memory_watch = nullptr;
      if (watches_[fault.rank]->fired()) ++plan_->without_effect;
      return done;
    } catch (...) {
      memory_watch = nullptr;
      if (watches_[fault.rank]->fired()) ++plan_->happened;
      throw;
    }
  }

 private:
  std::vector<std::unique_ptr<RankWatch>> watches_;  // outlive the threads of the ranks
  std::unique_ptr<Model> group_;
  const std::shared_ptr<FaultPlan> plan_;
};

}  // namespace turbomind::fuzz
