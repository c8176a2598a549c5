// Checks of an engine whose ranks fail: every op of every rank once, in every way.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "tests/engine/fuzz_mix.h"

namespace turbomind::fuzz {

// An engine on a group, and requests of which one step may have a fault.
class FaultBench {
 public:
  explicit FaultBench(int ranks) : plan_(std::make_shared<FaultPlan>()) {
    plan_->next = [this] { return std::exchange(next_, Fault{}); };
    EngineOptions options;
    options.cache_pages = 8;
    options.prefix_reuse = false;
    const auto make = [ranks] { return tiny_decoder(DType::f32, ranks, ranks); };
    engine_ = std::make_unique<Engine>(options, std::make_unique<FaultyGroup>(ranks, make, plan_));
  }

  Outcome run(int64_t tokens = 5) {
    SamplingParams params;
    params.max_new_tokens = 2;
    params.logprobs = 2;
    return collect(*engine_->submit(Tokens(tokens, 7), params), 1, -1).choices[0];
  }
  // Returns whether the fault happens in the first step of a request, which then fails alone.
  bool fails(const Fault& fault, const Outcome& want, int64_t tokens = 5) {
    const int64_t before = plan_->happened;
    next_ = fault;
    const Outcome got = run(tokens);
    check(plan_->without_effect == 0, "a step with a fault to fail");
    if (plan_->happened == before) return false;
    const std::string text = "rank " + std::to_string(fault.rank) + " fails at op";
    const bool named = got.error.compare(0, text.size(), text) == 0;
    check(got.reason == FinishReason::error && got.tokens.empty(), "the request to fail");
    check(named == (fault.kind == Fault::error), "the error of the rank, got: " + got.error);
    check_equal(run(tokens), want);
    return true;
  }
  void check_equal(const Outcome& got, const Outcome& want) {
    check(got.reason == FinishReason::length, "a step after one that failed, got: " + got.error);
    check(got.tokens == want.tokens, "the tokens of an undisturbed engine");
    for (size_t i = 0; i < want.logprobs.size(); ++i)
      check(got.logprobs[i].logprob == want.logprobs[i].logprob, "its logprobs");
  }
  void balance() { check_balance(*engine_); }

 private:
  const std::shared_ptr<FaultPlan> plan_;
  Fault next_;  // of the next step; written while the engine is idle
  std::unique_ptr<Engine> engine_;
};

// Returns how many ops a rank of an engine has in a step, each of which it has failed at.
inline int fail_at_every_op(FaultBench& bench, Fault fault, const Outcome& want) {
  for (fault.op = 0; bench.fails(fault, want); ++fault.op)
    check(fault.op < kMostOps, "kMostOps to be the most ops of a step");
  return fault.op;
}

inline void check_every_op(int ranks) {
  FaultBench bench(ranks);
  const Outcome want = bench.run();
  for (int rank = 0; rank < ranks; ++rank)
    for (const Fault::Kind kind : {Fault::error, Fault::memory}) {
      const int ops = fail_at_every_op(bench, {kind, rank}, want);
      // Embedding, per layer two norms, seven ops and two exchanges, and where the rank has rows of
      // the vocabulary the final norm and the head.
      check(ops >= 1 + 2 * 11, "every op of a step to fail, got " + std::to_string(ops));
    }
  bench.balance();
}

// Memory is allocated where a step is larger than all before, so every fault has an engine of its
// own, whose first step is small.
inline void check_every_allocation(Fault::Kind kind, int ranks) {
  constexpr int64_t kTokens = 150;
  const Outcome want = FaultBench(ranks).run(kTokens);
  for (int rank = 0; rank < ranks; ++rank) {
    Fault fault{kind, rank, -1};
    for (bool happened = true; happened; ++fault.skip) {
      FaultBench bench(ranks);
      bench.run(1);
      happened = bench.fails(fault, want, kTokens);
      bench.balance();
    }

    check(fault.skip > 2, "memory to be allocated, got " + std::to_string(fault.skip));
  }
}

}  // namespace turbomind::fuzz
