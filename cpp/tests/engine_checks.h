// Single rules of the engine, each shown by one small scenario.
#pragma once

#include <cmath>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cache/chain_key.h"
#include "tests/fuzz_reference.h"

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
  engine.check_invariants();
  Stats s = engine.stats();
  check(s.pages_free + s.pages_cached + s.pages_referenced == s.pages_total, "pages to balance");
  check(s.rows == 0 && s.waiting == 0, "no row in use when idle");
  check(s.handles == 0 && s.pages_referenced == 0, "no page held when all handles are closed");
  engine.evict();
  s = engine.stats();
  check(s.pages_free == s.pages_total, "every page free after evict()");
}

// A step that throws ends the requests in it, and nothing else.
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
  check(fine.reason == FinishReason::length, "the handle to go on, got: " + fine.error);
  engine.close(handle);
  check_balance(engine);
}

// Whole pages of a prompt are shared, within one owner only, and never the last token.
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
  check(reused(prompt, "b") == 0, "no page of another owner");
  engine.evict();
  check(reused(prompt, "a") == 0, "nothing to reuse after evict()");

  const HandleId handle = engine.open();
  // The same second page behind another first one is another page.
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
  check(turn.reused_tokens == 130, "a handle to keep all its KV");
  check(engine.stats().preemptions == 0, "no preemption in a pool with room");
}

// More prompts at once than the pool holds: all are served, some after giving way.
inline void check_preemption(Random& random) {
  scripted::Options script;
  EngineOptions options;
  options.cache_pages = 4;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(script));
  ScriptedReference reference(script);
  SamplingParams params;
  params.max_new_tokens = 100;
  std::vector<Tokens> prompts(5, Tokens(60));
  std::vector<std::shared_ptr<Request>> requests;
  for (Tokens& prompt : prompts) {
    for (int32_t& token : prompt) token = static_cast<int32_t>(random.in(0, 60));
    requests.push_back(engine.submit(prompt, params));
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Outcome got = collect(*requests[i], 1, -1).choices[0];
    check(got.tokens == reference.generate(prompts[i], params, 256)[0].tokens, "solo tokens");
  }
  check(engine.stats().preemptions > 0, "preemptions in a pool too small for two");
  check_balance(engine);
}

// The published vector of SipHash-2-4-128 for the empty message.
inline void check_siphash() {
  const ChainKey key = siphash128({0x0706050403020100u, 0x0f0e0d0c0b0a0908u}, nullptr, 0);
  check(key.lo == 0xe6a825ba047f81a3u && key.hi == 0x930255c71472f66du, "SipHash-2-4-128");
}

}  // namespace turbomind::fuzz
