// Checks of asynchronous scheduling: the engine submits a step before it has read the previous one.
// Each rule by one small scenario.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/engine/async_model.h"
#include "tests/engine/engine_checks.h"

namespace turbomind::fuzz {

inline scripted::Options async_script() {
  scripted::Options script;
  script.asynchronous = true;
  return script;
}

inline SamplingParams sampled_on_device(int64_t most) {
  SamplingParams params;
  params.max_new_tokens = most;
  params.temperature = 1;
  params.seed = 5;
  return params;
}

// Overlapped steps give the same tokens and log-probabilities.
inline void check_outcome(const Outcome& got, const Outcome& wanted) {
  check(got.tokens == wanted.tokens && got.reason == wanted.reason,
        "the tokens of the solo run from overlapped steps; " + got.error);
  check(got.logprobs.size() == wanted.logprobs.size(), "as many log-probabilities as tokens");
  for (size_t i = 0; i < got.logprobs.size(); ++i)
    check(got.logprobs[i].logprob == wanted.logprobs[i].logprob &&
              got.logprobs[i].top == wanted.logprobs[i].top,
          "the log-probabilities of the solo run");
}

// Sequences of different lengths, some of which end with a stop token, which only the host checks.
inline void check_steps_overlapped() {
  EngineOptions options;
  options.cache_pages = 40;
  Engine engine(options, std::make_unique<scripted::AsyncModel>(async_script()));
  ScriptedReference reference(async_script());
  struct Case {
    Tokens prompt;
    SamplingParams params;
    std::shared_ptr<Request> request;
  };
  std::vector<Case> cases;
  for (int i = 0; i < 8; ++i) {
    Case& c = cases.emplace_back();
    c.prompt = Tokens(3 + 40 * i, 7 + i);
    c.params = sampled_on_device(20 + 9 * i);
    const auto whole = reference.generate(c.prompt, c.params, 450)[0].tokens;
    if (i % 2 == 1) c.params.eos_token_ids = {whole[15]};
    if (i == 4) c.params.n = 3;
    if (i % 3 == 0) c.params.logprobs = i;
  }
  for (Case& c : cases) c.request = engine.submit(c.prompt, c.params);
  for (Case& c : cases) {
    const auto wanted = reference.generate(c.prompt, c.params, 450);
    const Report got = collect(*c.request, c.params.n, -1);
    for (int choice = 0; choice < c.params.n; ++choice)
      check_outcome(got.choices[choice], wanted[choice]);
  }
  const Stats stats = engine.stats();
  check(stats.steps_overlapped > stats.steps / 2, "most steps to be overlapped, got " +
                                                      std::to_string(stats.steps_overlapped) +
                                                      " of " + std::to_string(stats.steps));
  SamplingParams watched = sampled_on_device(20);
  watched.frequency_penalty = 0.1f;
  collect(*engine.submit({1, 2}, watched), 1, -1);
  check(engine.stats().steps_overlapped == stats.steps_overlapped,
        "no step to be overlapped with one that the host samples");
  check_balance(engine);
}

// Prompts continue chunk by chunk without the host, alone and beside sequences that decode.
inline void check_chunks_ahead() {
  EngineOptions options;
  options.cache_pages = 40;
  options.prefill_chunk = 16;
  options.step_ms = 1e6;  // however slow this machine is
  options.prefix_reuse = false;
  Engine engine(options, std::make_unique<scripted::AsyncModel>(async_script()));
  ScriptedReference reference(async_script());
  const SamplingParams few = sampled_on_device(2), many = sampled_on_device(60);
  const Tokens prompt(400, 8), other(290, 9), brief(5, 10);
  const Outcome alone = collect(*engine.submit(prompt, few), 1, -1).choices[0];
  check_outcome(alone, reference.generate(prompt, few, 450)[0]);
  const Stats first = engine.stats();
  check(first.steps == 26 && first.steps_overlapped == 25,  // 400 / 16 chunks and a token more
        "each step of a prompt but the first to be overlapped, got " +
            std::to_string(first.steps_overlapped) + " of " + std::to_string(first.steps));
  const auto decoding = engine.submit(brief, many);
  const auto one = engine.submit(prompt, few), two = engine.submit(other, few);
  check_outcome(collect(*decoding, 1, -1).choices[0], reference.generate(brief, many, 450)[0]);
  check_outcome(collect(*one, 1, -1).choices[0], reference.generate(prompt, few, 450)[0]);
  check_outcome(collect(*two, 1, -1).choices[0], reference.generate(other, few, 450)[0]);
  const Stats last = engine.stats();
  check(last.steps_overlapped - first.steps_overlapped > (last.steps - first.steps) * 2 / 3,
        "most steps beside prompts to be overlapped");
  check_balance(engine);
}

// A prompt that is cancelled, and one with a logits request, between steps of other sequences.
inline void check_prompts_leave() {
  scripted::Options script = async_script();
  script.layers = 1;
  script.layer_us = 200;
  EngineOptions options;
  options.cache_pages = 40;
  options.prefill_chunk = 8;
  options.prefix_reuse = false;
  Engine engine(options, std::make_unique<scripted::AsyncModel>(script));
  ScriptedReference reference(script);
  const SamplingParams params = sampled_on_device(50);
  const Tokens prompt(400, 8);
  const auto stays = engine.submit({1, 2, 3}, params);
  for (int i = 0; i < 4; ++i) {
    const auto leaves = engine.submit(prompt, params);
    check(leaves->wait(60), "progress");
    leaves->cancel();
    const Outcome left = collect(*leaves, 1, -1).choices[0];
    if (left.reason == FinishReason::cancelled) continue;  // else it had ended before
    check_outcome(left, reference.generate(prompt, params, 450)[0]);
  }
  RequestOptions logits;
  logits.kind = RequestKind::logits;
  const auto whole = engine.submit(prompt, {}, logits);
  collect(*whole, 1, -1);
  check(whole->logits == reference.logits(prompt), "the logits of the solo run");
  check_outcome(collect(*stays, 1, -1).choices[0], reference.generate({1, 2, 3}, params, 450)[0]);
  check_balance(engine);
}

// More choices at once than a step samples tokens.
inline void check_many_choices() {
  EngineOptions options;
  options.cache_pages = 600;
  options.max_batch_size = 2;
  Engine engine(options, std::make_unique<scripted::AsyncModel>(async_script()));
  ScriptedReference reference(async_script());
  SamplingParams params = sampled_on_device(2);
  params.n = 200;
  params.logprobs = 1;
  const Tokens prompt = {4, 5, 6};
  const auto wanted = reference.generate(prompt, params, 450);
  const auto one = engine.submit(prompt, params), two = engine.submit(prompt, params);
  for (const auto& request : {one, two}) {
    const Report got = collect(*request, params.n, -1);
    for (int choice = 0; choice < params.n; ++choice)
      check_outcome(got.choices[choice], wanted[choice]);
  }
  check_balance(engine);
}

// A waiting request gets the first slot that becomes free.
inline void check_turn_comes() {
  scripted::Options script = async_script();
  script.layers = 1;
  script.layer_us = 500;
  script.max_context = 20100;
  EngineOptions options;
  options.cache_pages = 400;
  options.max_batch_size = 2;
  Engine engine(options, std::make_unique<scripted::AsyncModel>(script));
  const auto slow = engine.submit({1, 2, 3}, sampled_on_device(20000));  // 10 seconds at least
  const auto quick = engine.submit({4, 5}, sampled_on_device(6));
  const auto waits = engine.submit({6, 7}, sampled_on_device(6));
  collect(*quick, 1, -1);
  check(collect(*waits, 1, -1).choices[0].tokens.size() == 6, "six tokens");
  for (const Event& event : slow->drain())
    check(!event.terminal, "a waiting request to be served as soon as a slot is free");
  slow->cancel();
  check(collect(*slow, 1, -1).choices[0].reason == FinishReason::cancelled, "a cancel");
  check_balance(engine);
}

// A model that fails once, when a test asks for it.
class FailingModel : public scripted::AsyncModel {
 public:
  FailingModel(std::atomic<int>& submits, std::atomic<int>& waits)
      : AsyncModel(async_script()), submits_(submits), waits_(waits) {}
  std::function<void()> at_submit = [] {}, at_failure = [] {};  // on the engine's thread
  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    at_submit();
    if (--submits_ == 0) throw Error(ErrorCode::internal, "submission");
    return AsyncModel::forward(batch, logits, cancel);
  }
  void read_tokens(int32_t* tokens) override {
    if (--waits_ == 0) {
      at_failure();
      throw Error(ErrorCode::internal, "waiting");
    }
    AsyncModel::read_tokens(tokens);
  }

 private:
  std::atomic<int>& submits_;
  std::atomic<int>& waits_;
};

// A step that fails, at submission or when it is read, ends the requests in it; tokens committed
// before remain.
inline void check_failing_ahead() {
  for (const bool at_submit : {true, false}) {
    std::atomic<int> submits{0}, waits{0};
    EngineOptions options;
    options.cache_pages = 40;
    Engine engine(options, std::make_unique<FailingModel>(submits, waits));
    ScriptedReference reference(async_script());
    const SamplingParams params = sampled_on_device(30);
    (at_submit ? submits : waits) = 12;
    const HandleId handle = engine.open();
    const Tokens prompt(60, 9);
    Tokens tokens = prompt;
    const auto first = engine.advance(handle, 0, prompt, params);
    const Outcome failed = collect(*first, 1, -1).choices[0];
    check(failed.reason == FinishReason::error &&
              failed.error == (at_submit ? "submission" : "waiting"),
          "the step's error, got: " + failed.error);
    check(failed.tokens.size() == 11, "the tokens of eleven steps");
    tokens.insert(tokens.end(), failed.tokens.begin(), failed.tokens.end());
    check(engine.token_ids(handle) == tokens, "the reported tokens to be committed");
    engine.check_invariants();
    SamplingParams rest = sampled_on_device(19);
    const Outcome more = collect(*engine.generate(handle, rest), 1, -1).choices[0];
    tokens.insert(tokens.end(), more.tokens.begin(), more.tokens.end());
    const auto wanted = reference.generate(prompt, params, 450)[0].tokens;
    check(Tokens(tokens.begin() + 60, tokens.end()) == wanted,
          "the handle to continue as if nothing had failed");
    engine.close(handle);
    check_balance(engine);
  }
}

// A failed step also cancels the step that follows it in flight. A prompt that was only in that one
// has no page that it has not written, so a fork shares no page that both would write.
inline void check_failing_before_a_prompt() {
  constexpr int kChunk = 16, kSteps = 20;  // of the first prompt, which has the chunks for itself
  std::atomic<int> submits{0}, waits{0};
  std::atomic<HandleId> copy{0};
  std::atomic<bool> held{true};
  auto owned = std::make_unique<FailingModel>(submits, waits);
  FailingModel& model = *owned;
  EngineOptions options;
  options.cache_pages = 60;
  options.prefill_chunk = kChunk;
  options.step_ms = 1e6;
  Engine engine(options, std::move(owned));
  ScriptedReference reference(async_script());
  const SamplingParams params = sampled_on_device(20);
  const Tokens second(200, 7), third(150, 4);
  const HandleId handle = engine.open();
  model.at_submit = [&] { held.wait(true); };
  model.at_failure = [&] { copy = engine.fork_later(handle); };  // before the next step
  waits = kSteps;
  const auto fails = engine.submit(Tokens(kChunk * kSteps, 9), params);
  RequestOptions later;
  later.priority = 1;
  const auto request = engine.advance(handle, 0, second, params, later);
  held = false;
  held.notify_all();
  check(collect(*fails, 1, -1).choices[0].error == "waiting", "the step's error");
  check_outcome(collect(*request, 1, -1).choices[0], reference.generate(second, params, 450)[0]);
  check(copy != 0 && engine.length(copy) == 200, "a fork of the prompt that continues");
  engine.check_invariants();
  const Outcome other = collect(*engine.advance(copy, 0, third, params), 1, -1).choices[0];
  check_outcome(other, reference.generate(third, params, 450)[0]);
  engine.close(copy);
  engine.close(handle);
  check_balance(engine);
}

// Calls on handles take effect between two steps, also when one is overlapped.
inline void check_calls_between() {
  EngineOptions options;
  options.cache_pages = 40;
  Engine engine(options, std::make_unique<scripted::AsyncModel>(async_script()));
  ScriptedReference reference(async_script());
  const SamplingParams params = sampled_on_device(300);
  const Tokens prompt(30, 3);
  const auto wanted = reference.generate(prompt, params, 450)[0].tokens;
  const HandleId handle = engine.open();
  const auto request = engine.advance(handle, 0, prompt, params);
  for (int i = 0; i < 20; ++i) {
    const HandleId copy = engine.fork(handle);
    engine.check_invariants();
    Tokens copied = engine.token_ids(copy);
    check(copied.size() >= 30 && std::equal(copied.begin() + 30, copied.end(), wanted.begin()),
          "a fork to hold what was committed");
    const Outcome next = collect(*engine.generate(copy, sampled_on_device(3)), 1, -1).choices[0];
    const auto after_fork = reference.generate(copied, sampled_on_device(3), 450)[0].tokens;
    check(next.tokens == after_fork, "the tokens after a fork");
    engine.close(copy);
  }
  check(collect(*request, 1, -1).choices[0].tokens == wanted, "the tokens of the solo run");
  engine.close(handle);
  check_balance(engine);
}

inline void check_ahead() {
  check_steps_overlapped();
  check_chunks_ahead();
  check_prompts_leave();
  check_many_choices();
  check_turn_comes();
  check_failing_ahead();
  check_failing_before_a_prompt();
  check_calls_between();
}

}  // namespace turbomind::fuzz
