// Checks of single rules of the engine, each by one small scenario.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cache/block_hash.h"
#include "tests/engine/fuzz_reference.h"

namespace turbomind::fuzz {

using Tokens = std::vector<int32_t>;

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  // Uniform in [low, high].
  int64_t in(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  bool one_in(int n) { return in(1, n) == 1; }
  template <typename T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + in(0, static_cast<int64_t>(values.size()) - 1));
  }

 private:
  std::mt19937_64 engine_;
};

inline void check_balance(Engine& engine) {
  check(engine.flush()->wait(60), "saves to come to an end");
  engine.check_invariants();
  Stats s = engine.stats();
  check(s.pages_free + s.pages_cached + s.pages_referenced == s.pages_total, "pages to balance");
  check(s.slots == 0 && s.waiting == 0, "no slot to be in use when idle");
  check(s.handles == 0 && s.pages_referenced == 0,
        "no page to be referenced when all handles are closed");
  engine.evict();
  s = engine.stats();
  check(s.pages_free == s.pages_total, "every page to be free after evict()");
  for (const GroupStats& group : s.groups)
    check(group.free == group.total && group.out_of_reach == 0, "every page of a group to be free");
}

// A step that throws ends the requests in it and no others.
inline void check_failing_step() {
  scripted::Options script;
  script.bomb = 60;
  EngineOptions options;
  options.cache_pages = 8;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(script));
  const HandleId handle = engine.open();
  engine.append(handle, {1, 2, 60});
  SamplingParams params;
  params.max_new_tokens = 3;
  params.logit_bias.emplace_back(60, -INFINITY);
  const auto failed = collect(*engine.generate(handle, params), 1, -1).choices[0];
  check(failed.reason == FinishReason::error && failed.error == "bomb", "the step's error");
  engine.truncate(handle, 2);
  const auto fine = collect(*engine.generate(handle, params), 1, -1).choices[0];
  check(fine.reason == FinishReason::length, "the handle to continue, got: " + fine.error);
  engine.close(handle);
  check_balance(engine);
}

// Throws on the first copy of a page, as a device without memory does.
class CopylessModel : public scripted::ScriptedModel {
 public:
  CopylessModel() : ScriptedModel(scripted::Options{}) {}
  void copy_page(int group, int32_t src, int32_t dst) override {
    if (!std::exchange(failed_, true)) throw std::bad_alloc();
    ScriptedModel::copy_page(group, src, dst);
  }

 private:
  bool failed_ = false;
};

// A page that was taken for a copy is released when the copy fails.
inline void check_failing_copy() {
  EngineOptions options;
  options.cache_pages = 4;
  Engine engine(options, std::make_unique<CopylessModel>());
  SamplingParams params;
  params.max_new_tokens = 3;
  params.n = 2;  // share the unfinished page of the prompt until they write to it
  for (const FinishReason end : {FinishReason::error, FinishReason::length}) {
    const Report report = collect(*engine.submit(Tokens(10, 7), params), 2, -1);
    for (const Outcome& got : report.choices)
      check(got.reason == end, "a copy to fail once, and then no more, got: " + got.error);
    check_balance(engine);
  }
}

// Full pages of a prompt are shared, only within one salt, and the last token is always computed.
inline void check_sharing() {
  EngineOptions options;
  options.cache_pages = 16;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(scripted::Options{}));
  SamplingParams params;
  params.max_new_tokens = 1;
  const auto reused = [&](Tokens tokens, const char* salt) {
    RequestOptions request;
    request.salt = salt;
    return collect(*engine.submit(std::move(tokens), params, request), 1, -1).reused_tokens;
  };
  const Tokens prompt(130, 7);
  check(reused(prompt, "a") == 0, "nothing to reuse at first");
  check(reused(prompt, "a") == 128, "two pages to be reused");
  check(reused(Tokens(128, 7), "a") == 64, "the last token of a prompt to be computed");
  check(reused(prompt, "b") == 0, "no page of another salt");
  engine.evict();
  check(reused(prompt, "a") == 0, "nothing to reuse after evict()");

  const HandleId handle = engine.open();
  // The same second page after another first page is another page.
  Tokens other(130, 7);
  other[5] = 8;
  engine.append(handle, prompt);
  collect(*engine.generate(handle, params), 1, -1);
  engine.truncate(handle, 3);
  engine.append(handle, Tokens(other.begin() + 3, other.end()));
  const Outcome edited = collect(*engine.generate(handle, params), 1, -1).choices[0];
  ScriptedReference reference{scripted::Options{}};
  check(edited.tokens == reference.generate(other, params, 450)[0].tokens,
        "the edited handle's token");
  engine.append(handle, {1, 2});
  const Report turn = collect(*engine.generate(handle, params), 1, -1);
  other.insert(other.end(), {edited.tokens[0], 1, 2});
  check(turn.choices[0].tokens == reference.generate(other, params, 450)[0].tokens,
        "the token after an edit and another turn");
  check(turn.reused_tokens == 130, "a handle to reuse all its KV");
  check(engine.stats().preemptions == 0, "no preemption in a pool with room");
}

// A model whose steps, except the first `free` ones, block until they are released.
class HeldModel : public scripted::ScriptedModel {
 public:
  explicit HeldModel(std::shared_ptr<std::atomic<bool>> held, int free = 0)
      : ScriptedModel(scripted::Options{}), held_(std::move(held)), free_(free) {}
  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    if (--free_ < 0) held_->wait(true);
    return ScriptedModel::forward(batch, logits, cancel);
  }

 private:
  std::shared_ptr<std::atomic<bool>> held_;
  int free_;
};

// Methods that are documented not to wait do not wait: this would hang otherwise.
inline void check_no_waiting() {
  const auto held = std::make_shared<std::atomic<bool>>(false);
  EngineOptions options;
  options.cache_pages = 16;
  Engine engine(options, std::make_unique<HeldModel>(held));
  ScriptedReference reference{scripted::Options{}};
  SamplingParams params;
  params.max_new_tokens = 3;
  const Tokens prompt(70, 7), more(5, 8);
  const HandleId open_handle = engine.open();
  const auto first = collect(*engine.advance(open_handle, 0, prompt, params), 1, -1).choices[0];
  Tokens whole = prompt;
  whole.insert(whole.end(), first.tokens.begin(), first.tokens.end());
  whole.insert(whole.end(), more.begin(), more.end());

  held->store(true);
  const auto running = engine.submit(prompt, params);
  const HandleId handle = engine.open();
  const HandleId copy = engine.fork_later(open_handle, 1.0f);
  const auto turn = engine.advance(copy, 73, more, params);
  const auto closed = engine.advance(handle, 0, prompt, params);
  engine.close(handle);
  const auto unknown = engine.advance(handle, 0, prompt, params);
  held->store(false);
  held->notify_all();

  check(collect(*running, 1, -1).choices[0].tokens == first.tokens, "the stateless tokens");
  check(collect(*turn, 1, -1).choices[0].tokens == reference.generate(whole, params, 450)[0].tokens,
        "the tokens of a turn on a fork");
  check(collect(*closed, 1, -1).choices[0].reason == FinishReason::cancelled,
        "close() to cancel the running request");
  check(collect(*unknown, 1, -1).choices[0].error_code == ErrorCode::not_found,
        "no handle to be left after close()");
  engine.close(copy);
  engine.close(open_handle);
  check_balance(engine);
}

// advance() does everything or nothing; open(), fork_later() and close() take effect in order.
inline void check_advance() {
  EngineOptions options;
  options.cache_pages = 16;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(scripted::Options{}));
  ScriptedReference reference{scripted::Options{}};
  SamplingParams params;
  params.max_new_tokens = 3;
  const HandleId handle = engine.open();
  const HandleId empty = engine.fork_later(handle);
  Tokens tokens(100, 7);
  const auto first = collect(*engine.advance(handle, 0, tokens, params), 1, -1).choices[0];
  check(first.tokens == reference.generate(tokens, params, 450)[0].tokens, "a first turn's tokens");
  tokens.insert(tokens.end(), first.tokens.begin(), first.tokens.end());

  SamplingParams endless = params;
  endless.max_new_tokens = 1000000;
  SamplingParams continued = params;
  continued.continued = 52;
  const HandleId unknown = engine.fork_later(1 << 30);
  const auto refused = [&](HandleId id, int64_t prefix_length, Tokens append,
                           const SamplingParams& p) {
    const auto outcome =
        collect(*engine.advance(id, prefix_length, append, p, {}, 5.0f), 1, -1).choices[0];
    check(outcome.reason == FinishReason::error && outcome.tokens.empty(), "advance() to fail");
    return outcome.error_code;
  };
  check(refused(unknown, 0, {1}, params) == ErrorCode::not_found, "not_found");
  check(refused(handle, 104, {1}, params) == ErrorCode::invalid_request,
        "a prefix_length beyond the handle to be refused");
  check(refused(handle, 0, {}, params) == ErrorCode::invalid_request, "a prompt");
  check(refused(handle, 50, {1}, continued) == ErrorCode::invalid_request,
        "continued beyond the prompt to be refused");
  check(refused(handle, 50, {1}, endless) == ErrorCode::context_full, "context_full");
  check(engine.token_ids(handle) == tokens, "the handle to be unchanged");
  check(engine.length(empty) == 0, "a fork to have the tokens of its time");

  const Report again = collect(*engine.advance(handle, 103, {1, 2}, params), 1, -1);
  check(again.reused_tokens == 102, "a handle to reuse all its KV after a refused turn");
  tokens.insert(tokens.end(), {1, 2});
  check(again.choices[0].tokens == reference.generate(tokens, params, 450)[0].tokens,
        "the next turn's tokens");
  engine.close(unknown);
  for (const HandleId id : {handle, empty}) engine.close(id);
  check(engine.stats().handles == 0, "no handle to be left after close()");
  check_balance(engine);
}

// More prompts at once than the pool holds: all are served, some after a preemption, since they
// generate more than is expected of them.
inline void check_preemption(Random& random) {
  scripted::Options script;
  EngineOptions options;
  options.cache_pages = 12;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(script));
  ScriptedReference reference(script);
  SamplingParams params;
  params.max_new_tokens = 1;
  for (int i = 0; i < 20; ++i) collect(*engine.submit({1}, params), 1, -1);
  params.max_new_tokens = 380;
  std::vector<Tokens> prompts(5, Tokens(60));
  std::vector<std::shared_ptr<Request>> requests;
  for (Tokens& prompt : prompts) {
    for (int32_t& token : prompt) token = static_cast<int32_t>(random.in(0, 60));
    requests.push_back(engine.submit(prompt, params));
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Outcome got = collect(*requests[i], 1, -1).choices[0];
    check(got.tokens == reference.generate(prompts[i], params, 450)[0].tokens, "solo tokens");
  }
  check(engine.stats().preemptions > 0, "preemptions in a pool too small for two");
  check_balance(engine);
}

// Submits prompts at once that differ in the last token, checks their tokens, and returns whether
// about one of them was computed.
inline bool computes_one_prompt(bool cancels, int prompt_tokens, int new_tokens) {
  constexpr int kRequests = 8;
  const auto held = std::make_shared<std::atomic<bool>>(true);
  EngineOptions options;
  options.cache_pages = 80;
  options.prefill_chunk = 32;
  Engine engine(options, std::make_unique<HeldModel>(held, 3));
  ScriptedReference reference{scripted::Options{}};
  Tokens prompt(prompt_tokens);
  for (int i = 0; i < prompt_tokens; ++i) prompt[i] = i % 61;
  SamplingParams params;
  params.max_new_tokens = new_tokens;
  std::vector<std::shared_ptr<Request>> requests;
  std::vector<Tokens> prompts;
  for (int i = 0; i < kRequests; ++i) {
    prompts.push_back(prompt);
    prompts.back().back() = i;
    requests.push_back(engine.submit(prompts.back(), params));
  }
  if (cancels) requests[0]->cancel();
  held->store(false);
  held->notify_all();
  for (int i = cancels ? 1 : 0; i < kRequests; ++i) {
    const Outcome got = collect(*requests[i], 1, -1).choices[0];
    check(got.tokens == reference.generate(prompts[i], params, 450)[0].tokens, "solo tokens");
  }
  const Stats stats = engine.stats();
  check(stats.tokens_reused + stats.tokens_missed == stats.requests_started * prompt_tokens,
        "hits and misses to add up to the prompts");
  check_balance(engine);
  // A request that is cancelled may have computed a chunk that is thrown away.
  const int64_t most = prompt_tokens * 6 / 5 + (cancels ? options.prefill_chunk : 0);
  return stats.tokens_prefilled <= most && stats.prefixes_awaited >= kRequests - 2;
}

// Of prompts submitted at once that differ in the last token one is computed; the others share its
// pages, full or not, also when the request that computes them ends or is cancelled meanwhile. On a
// busy machine the engine may see the others too late.
inline void check_prefix_in_flight(bool cancels, int prompt_tokens, int new_tokens) {
  for (int attempt = 0; attempt < 20; ++attempt)
    if (computes_one_prompt(cancels, prompt_tokens, new_tokens)) return;
  check(false, "one prompt of " + std::to_string(prompt_tokens) + " tokens to be computed");
}

// A prefix that stateless requests share outlives the pages of sessions that were closed long ago,
// which at first are kept longer.
inline void check_ageing() {
  EngineOptions options;
  options.cache_pages = 64;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(scripted::Options{}));
  SamplingParams params;
  params.max_new_tokens = 1;
  Random random(1);
  const auto prompt = [&](int64_t tokens) {
    Tokens ids(tokens);
    for (int32_t& id : ids) id = static_cast<int32_t>(random.in(0, 60));
    return ids;
  };
  std::vector<Tokens> closed;
  HandleOptions session;
  session.retention_priority = 1;
  for (int i = 0; i < 9; ++i) {
    const HandleId handle = engine.open(session);
    closed.push_back(prompt(390));
    engine.append(handle, closed.back());
    collect(*engine.generate(handle, params), 1, -1);
    engine.close(handle);
  }
  const Tokens hot = prompt(256);
  const auto found = [&](Tokens tokens) {
    tokens.push_back(1);
    return collect(*engine.submit(std::move(tokens), params), 1, -1).reused_tokens;
  };
  const auto traffic = [&](int requests) {
    int64_t hits = 0;
    for (int i = 0; i < requests; ++i)
      if (i % 5 == 0) {
        hits += found(hot) == 256;
      } else {
        found(prompt(200));
      }
    return hits;
  };
  traffic(40);
  check(found(closed[0]) == 384, "the pages of a session closed not long ago");
  traffic(400);
  check(traffic(100) >= 19, "a hit in nearly all of 20 requests with the common prefix");
}

// Two sequences that do not fit the pool together are not preempted over and over: the second one
// waits until there is room for what both are expected to generate.
inline void check_hysteresis() {
  constexpr int kPrompt = 640;
  for (const int generated : {200, 640, 1500}) {
    scripted::Options script;
    script.max_context = 3000;
    EngineOptions options;
    options.cache_pages = std::max(22, (kPrompt + generated) / kPageTokens + 2);
    Engine engine(options, std::make_unique<scripted::ScriptedModel>(script));
    ScriptedReference reference(script);
    SamplingParams params;
    params.max_new_tokens = generated;
    const Tokens one(kPrompt, 7), two(kPrompt, 8);
    const auto first = engine.submit(one, params), second = engine.submit(two, params);
    check(
        collect(*first, 1, -1).choices[0].tokens == reference.generate(one, params, 3000)[0].tokens,
        "the first one's tokens");
    check(collect(*second, 1, -1).choices[0].tokens ==
              reference.generate(two, params, 3000)[0].tokens,
          "the second one's tokens");
    const Stats stats = engine.stats();
    check(stats.preemptions <= 3, "few preemptions, got " + std::to_string(stats.preemptions));
    check(stats.tokens_prefilled <= 2 * kPrompt * 6 / 5,
          "few tokens to be computed again, got " + std::to_string(stats.tokens_prefilled));
    check(stats.tokens_prefilled - 2 * kPrompt == stats.tokens_recomputed,
          "what is computed again to be counted, got " + std::to_string(stats.tokens_recomputed));
    check_balance(engine);
  }
}

// A better priority takes the slot of a worse one, which continues later with its KV.
inline void check_priority() {
  EngineOptions options;
  options.cache_pages = 16;
  options.max_batch_size = 1;
  SamplingParams params;
  const Tokens prompt(10, 7), other(10, 8);
  ScriptedReference reference{scripted::Options{}};
  for (const int priority : {1, 0}) {
    const auto held = std::make_shared<std::atomic<bool>>(true);
    Engine engine(options, std::make_unique<HeldModel>(held, 2));
    RequestOptions request;
    request.priority = 1;
    params.max_new_tokens = 200;
    const auto slow = engine.submit(prompt, params, request);
    check(slow->wait(60), "a first token");  // it is running, and not done before the other comes
    request.priority = priority;
    SamplingParams few = params;
    few.max_new_tokens = 3;
    const auto quick = engine.submit(other, few, request);
    held->store(false);
    held->notify_all();
    check(collect(*quick, 1, -1).choices[0].tokens == reference.generate(other, few, 450)[0].tokens,
          "solo tokens of the one that came later");
    check(collect(*slow, 1, -1).choices[0].tokens ==
              reference.generate(prompt, params, 450)[0].tokens,
          "solo tokens of the one that came first");
    const Stats stats = engine.stats();
    check(stats.preemptions == (priority == 0), "a slot to go to a better priority only");
    check(stats.tokens_prefilled == 20, "nothing to be computed again");
    check_balance(engine);
  }
}

// A priority that changes while requests run or wait moves the slot, and nothing is computed again.
inline void check_reprioritize() {
  EngineOptions options;
  options.cache_pages = 16;
  options.max_batch_size = 1;
  SamplingParams params, few;
  params.max_new_tokens = 200;
  few.max_new_tokens = 3;
  const Tokens prompt(10, 7), other(10, 8);
  ScriptedReference reference{scripted::Options{}};
  for (const bool promotes : {false, true}) {
    const auto held = std::make_shared<std::atomic<bool>>(true);
    Engine engine(options, std::make_unique<HeldModel>(held, 2));
    RequestOptions request;
    request.priority = 1;
    const auto slow = engine.submit(prompt, params, request);
    check(slow->wait(60), "a first token");
    const auto quick = engine.submit(other, few, request);
    if (promotes) {
      quick->set_priority(0);
    } else {
      slow->set_priority(2);
    }
    held->store(false);
    held->notify_all();
    check(collect(*quick, 1, -1).choices[0].tokens == reference.generate(other, few, 450)[0].tokens,
          "solo tokens of the one that got the slot");
    check(engine.stats().slots + engine.stats().waiting <= 1, "the other one to be under way");
    slow->set_priority(0);
    check(collect(*slow, 1, -1).choices[0].tokens ==
              reference.generate(prompt, params, 450)[0].tokens,
          "solo tokens of the one that lost it");
    slow->set_priority(5);  // it has ended: nothing happens
    const Stats stats = engine.stats();
    check(stats.preemptions == 1, "one preemption, got " + std::to_string(stats.preemptions));
    check(stats.tokens_prefilled == 20, "nothing to be computed again");
    check_balance(engine);
  }
}

// Priorities that other threads change all the time change no token.
inline void check_reprioritize_storm() {
  EngineOptions options;
  options.cache_pages = 40;
  options.max_batch_size = 2;
  SamplingParams params;
  params.max_new_tokens = 60;
  params.n = 2;
  ScriptedReference reference{scripted::Options{}};
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(scripted::Options{}));
  std::vector<std::shared_ptr<Request>> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(engine.submit(Tokens(20, 7 + i), params));
  std::atomic<bool> done{false};
  std::thread changer([&] {
    for (int i = 0; !done; ++i) requests[i % 4]->set_priority(i * 7 % 5);
  });
  for (int i = 0; i < 4; ++i) {
    const auto found = collect(*requests[i], 2, -1);
    const auto expected = reference.generate(Tokens(20, 7 + i), params, 450);
    for (int choice = 0; choice < 2; ++choice)
      check(found.choices[choice].tokens == expected[choice].tokens, "solo tokens");
  }
  done = true;
  changer.join();
  check_balance(engine);
}

// A cancel and the end of the engine take effect between layers: these steps would take minutes.
inline void check_cancel() {
  scripted::Options script;
  script.layers = 1000000;
  script.layer_us = 200;
  EngineOptions options;
  options.cache_pages = 4;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(script));
  std::vector<std::shared_ptr<Request>> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(engine.submit(Tokens(10, 7), {}));
    std::this_thread::sleep_for(std::chrono::milliseconds(i));
    if (i < 3) requests.back()->cancel();
  }
  for (int i = 0; i < 3; ++i)
    check(collect(*requests[i], 1, -1).choices[0].reason == FinishReason::cancelled, "a cancel");
  engine.shutdown();
  check(collect(*requests[3], 1, -1).choices[0].reason == FinishReason::cancelled, "an end");
}

// A cancelled choice ends and computes nothing more; the others of its request continue.
inline void check_cancel_choice() {
  scripted::Options script;
  script.max_context = 20100;
  script.layers = 1;
  script.layer_us = 200;
  EngineOptions options;
  options.cache_pages = 4000;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(script));
  SamplingParams params;
  params.n = 3;
  params.max_new_tokens = 20000;  // 4 seconds at least
  const auto request = engine.submit(Tokens(100, 7), params);
  request->cancel_choice(0);  // computes the prompt for the others first
  request->cancel_choice(200);
  int64_t tokens[3] = {0, 0, 0};
  bool ended[3] = {false, false, false};
  const auto read = [&] {
    check(request->wait(60), "events of the other choices");
    for (const Event& event : request->drain()) {
      tokens[event.choice] += static_cast<int64_t>(event.token_ids.size());
      if (event.finish == FinishReason::none) continue;
      check(event.finish == FinishReason::cancelled && !event.terminal, "the end of one choice");
      ended[event.choice] = true;
    }
  };
  while (tokens[2] < 3) read();
  check(ended[0] && tokens[0] == 1, "a first choice that ends with the token of its prompt");
  request->cancel_choice(2);
  request->cancel_choice(2);
  while (!ended[2]) read();
  const int64_t cut = tokens[2], others = tokens[1];
  check(engine.stats().slots == 1, "the slots of two choices to be free");
  while (tokens[1] < others + 10) read();
  check(tokens[2] == cut && !ended[1], "the other choice alone to continue");
  for (const int choice : {-1, kMaxChoices}) try {
      request->cancel_choice(choice);
      check(false, "an error for a choice that no request has");
    } catch (const Error& e) {
      check(e.code() == ErrorCode::invalid_request, "the error invalid_request");
    }
  request->cancel_choice(1);
  while (!request->done()) {
    request->wait(60);
    for (const Event& event : request->drain())
      if (event.terminal) check(event.choice == 1, "the last choice's end to be terminal");
  }
  check_balance(engine);
}

// Prompts that are cancelled as soon as they run, one after another, do not starve other requests.
inline void check_cancel_storm() {
  scripted::Options script;
  script.layers = 20;
  script.layer_us = 300;
  EngineOptions options;
  options.cache_pages = 32;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(script));
  SamplingParams params;
  params.max_new_tokens = 20;
  const auto request = engine.submit(Tokens(10, 7), params);
  while (engine.stats().tokens_decoded == 0) std::this_thread::yield();
  bool done = false;
  auto current = engine.submit(Tokens(400, 8), params);
  for (int i = 0; i < 2000 && !done; ++i) {
    const auto next = engine.submit(Tokens(400, 8), params);
    std::this_thread::sleep_for(std::chrono::microseconds(1500));
    current->cancel();
    current = next;
    for (const Event& event : request->drain()) done = event.terminal;
  }
  check(done, "a request to end while others are cancelled");
}

// Sizes at the limits of their types are refused or clamped, without overflow.
inline void check_extremes() {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EngineOptions options;
  options.cache_pages = 4;
  options.max_context_tokens = kMost;
  options.prefill_chunk = std::numeric_limits<int>::max();
  for (const double step_ms : {1e-300, 1e300}) {
    options.step_ms = step_ms;
    Engine engine(options, std::make_unique<scripted::ScriptedModel>(scripted::Options{}));
    SamplingParams params;
    params.max_new_tokens = kMost;
    const Outcome refused = collect(*engine.submit({1, 2}, params), 1, -1).choices[0];
    check(refused.error_code == ErrorCode::context_full, "context_full, got: " + refused.error);
    params.max_new_tokens = -1;
    const Outcome filled = collect(*engine.submit(Tokens(100, 1), params), 1, -1).choices[0];
    check(filled.tokens.size() == 4 * kPageTokens - 100, "tokens to the end of the pool");
    check_balance(engine);
  }
  options.step_ms = 100;
  for (const int64_t bytes : {int64_t{0}, int64_t{-1}, int64_t{1}}) {
    options.cache_pages = 0;
    options.cache_bytes = bytes;
    bool refused = false;
    try {
      Engine engine(options, std::make_unique<scripted::ScriptedModel>(scripted::Options{}));
    } catch (const Error& e) {
      refused = e.code() == ErrorCode::invalid_request;
    }
    check(refused, "a cache without a page to be refused");
  }
}

// The published vector of SipHash-2-4-128 for the empty message.
inline void check_siphash() {
  const BlockHash key = siphash128({0x0706050403020100u, 0x0f0e0d0c0b0a0908u}, nullptr, 0);
  check(key.lo == 0xe6a825ba047f81a3u && key.hi == 0x930255c71472f66du, "SipHash-2-4-128");
}

}  // namespace turbomind::fuzz
