// Checks of the engine with lower tiers, each rule by one small scenario.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/make_tiers.h"
#include "tests/engine/engine_checks.h"
#include "tests/tiers/test_tier.h"

namespace turbomind::fuzz {

// Makes an engine over a shelf (test_tier.h) that earlier and later engines share.
inline std::unique_ptr<Engine> tiered_engine(const std::shared_ptr<Shelf>& shelf,
                                             const scripted::Options& script = {},
                                             int64_t pages = 16) {
  EngineOptions options;
  options.cache_pages = pages;
  TierPtrs tiers;
  tiers.push_back(std::make_unique<TestTier>(shelf, script.numerics));
  return std::make_unique<Engine>(options, std::make_unique<scripted::ScriptedModel>(script),
                                  std::move(tiers));
}

inline HandleId open_persisting(Engine& engine) {
  HandleOptions options;
  options.persist = true;
  return engine.open(options);
}

inline void flush(Engine& engine) {
  check(engine.flush()->wait(60), "saves to end");
}

inline SamplingParams few_tokens(int count) {
  SamplingParams params;
  params.max_new_tokens = count;
  params.temperature = 0;
  return params;
}

// Runs one turn, whose tokens must be those of the solo run.
inline Report take_turn(Engine& engine, HandleId handle, Tokens& tokens, const Tokens& more,
                        int count, bool exact = false) {
  static ScriptedReference reference{scripted::Options{}};
  const int64_t prefix_length = static_cast<int64_t>(tokens.size());
  tokens.insert(tokens.end(), more.begin(), more.end());
  RequestOptions options;
  options.exact = exact;
  Report report =
      collect(*engine.advance(handle, prefix_length, more, few_tokens(count), options), 1, -1);
  const Outcome& got = report.choices[0];
  check(got.tokens == reference.generate(tokens, few_tokens(count), 450)[0].tokens,
        "the solo run's tokens, got: " + got.error);
  tokens.insert(tokens.end(), got.tokens.begin(), got.tokens.end());
  return report;
}

// forecasts() answers for many sequences what residence() and predict_ttft() answer for one.
inline void check_forecasts(Engine& engine, const Tokens& tokens) {
  std::vector<ForecastQuery> queries;
  const auto asked = static_cast<ptrdiff_t>(tokens.size());
  for (ptrdiff_t length = asked; length >= 0; length -= 37)
    queries.push_back({Tokens(tokens.begin(), tokens.begin() + length), ""});
  queries.push_back({tokens, "another owner"});
  const auto found = engine.forecasts(queries, 5);
  check(found.size() == queries.size(), "one forecast of each sequence");
  for (size_t i = 0; i < queries.size(); ++i) {
    const Residence where = engine.residence(queries[i].token_ids, queries[i].salt);
    check(found[i].where.device == where.device && found[i].where.tiers == where.tiers,
          "the residence of each sequence, in order");
    check(found[i].ttft == engine.predict_ttft(queries[i].token_ids, 5, queries[i].salt),
          "the time of each sequence, in order");
  }
  check(found.front().where.tiers != found.back().where.tiers, "owners to be told apart");
  check(engine.forecasts({}, 5).empty(), "nothing of nothing");
}

// A session continues from its saved pages: in another engine, after an eviction, from the middle
// of a page. Nothing is computed twice.
inline void check_coming_back() {
  const auto shelf = std::make_shared<Shelf>();
  Tokens tokens;
  {
    auto engine = tiered_engine(shelf);
    const HandleId handle = open_persisting(*engine);
    take_turn(*engine, handle, tokens, Tokens(150, 7), 20);
    flush(*engine);
    check(engine->stats().tiers[0].pages == 2, "two full pages to be saved without a call");
    engine->save(handle);
    flush(*engine);
    check(engine->stats().tiers[0].pages == 3, "the unfinished page to be saved, too");
    engine->close(handle);
    check_balance(*engine);
  }
  const int64_t written = static_cast<int64_t>(tokens.size()) - 1;
  {
    auto engine = tiered_engine(shelf);
    HandleId handle = open_persisting(*engine);
    engine->append(handle, tokens);
    const Residence where = engine->residence(tokens);
    check(where.device == 0 && where.tiers.at(0) == written, "all of it to be in the tier");
    check_forecasts(*engine, tokens);
    Report report = take_turn(*engine, handle, tokens, {1, 2, 3}, 4);
    check(report.reused_tokens == written && report.loaded_tokens == written &&
              report.foreign_tokens == 0,
          "all of it to be loaded");
    check(engine->stats().tokens_prefilled == 4, "four tokens to be computed");
    // A branch that differs from the middle of the second page on.
    Tokens branch(tokens.begin(), tokens.begin() + 100);
    const HandleId other = engine->open();
    engine->append(other, branch);
    report = take_turn(*engine, other, branch, {9}, 2);
    check(report.reused_tokens == 100 && report.loaded_tokens == 36,
          "the first page from the device and a prefix of the second one from the tier");
    engine->close(other);
    engine->close(handle, true);
    engine->evict();
    check_balance(*engine);
  }
  auto engine = tiered_engine(shelf);
  const HandleId handle = open_persisting(*engine);
  engine->append(handle, tokens);
  engine->warm(handle);
  while (engine->residence(tokens).device + 1 < static_cast<int64_t>(tokens.size()))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const Report report = take_turn(*engine, handle, tokens, {1}, 2);
  check(report.loaded_tokens == 0, "nothing to be loaded after warm()");
  check(engine->stats().tokens_prefilled == 2, "two tokens to be computed after warm()");
  engine->remove_pages(engine->page_keys(tokens));
  engine->close(handle);
  engine->remove_pages(engine->page_keys(tokens));
  flush(*engine);
  check(engine->residence(tokens).tiers[0] == 0, "nothing to be left of removed pages");
  check_balance(*engine);
}

// The pages of a preempted sequence are copied to host memory, from where it continues, and to no
// disk, since the sequence does not persist.
inline void check_offload() {
  scripted::Options script;
  script.max_context = 2000;
  script.layers = 1;
  script.layer_us = 300;  // computing a page takes longer than loading it
  EngineOptions options;
  options.cache_pages = 24;
  options.prefill_chunk = 64;
  options.host_bytes = 16 << 20;
  auto model = std::make_unique<scripted::ScriptedModel>(script);
  const auto shelf = std::make_shared<Shelf>();
  TierPtrs tiers = make_tiers(options, *model);
  tiers.push_back(std::make_unique<TestTier>(shelf, script.numerics));
  Engine engine(options, std::move(model), std::move(tiers));
  ScriptedReference reference(script);
  RequestOptions worse;
  worse.priority = 1;
  const Tokens one(440, 7), two(64, 8);
  const auto preempted = engine.submit(one, few_tokens(600), worse);
  check(preempted->wait(60), "the first one to run");
  const auto other = engine.submit(two, few_tokens(1100));
  check(collect(*other, 1, -1).choices[0].tokens ==
            reference.generate(two, few_tokens(1100), 2000)[0].tokens,
        "the tokens of the one with the better priority");
  check(collect(*preempted, 1, -1).choices[0].tokens ==
            reference.generate(one, few_tokens(600), 2000)[0].tokens,
        "the tokens of the preempted one");
  flush(engine);
  const Stats stats = engine.stats();
  check(stats.preemptions > 0, "a preemption");
  check(stats.tiers[0].pages > 0 && stats.pages_loaded > 0, "pages to come from host memory");
  check(stats.tiers[1].pages == 0, "no page on disk");
  // On a busy machine loading is measured as slower, and some pages are computed again.
  check(stats.tokens_recomputed < static_cast<int64_t>(one.size()),
        "fewer tokens than the prompt to be computed again, got " +
            std::to_string(stats.tokens_recomputed));
}

// Other requests continue while one waits for its pages, and a cancel ends it at once.
inline void check_set_aside() {
  const auto shelf = std::make_shared<Shelf>();
  Tokens tokens;
  {
    auto engine = tiered_engine(shelf);
    take_turn(*engine, open_persisting(*engine), tokens, Tokens(200, 7), 4);
  }
  shelf->held = true;  // neither of the two would end if it waited for a read
  auto engine = tiered_engine(shelf);
  const auto start = std::chrono::steady_clock::now();
  const auto waits = engine->submit(tokens, few_tokens(2));
  while (shelf->waiting == 0) std::this_thread::yield();
  Tokens other;
  take_turn(*engine, engine->open(), other, Tokens(40, 8), 30);
  waits->cancel();
  const Outcome ended = collect(*waits, 1, -1).choices[0];
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  // On a machine that stalls for two seconds the fetch is cancelled at its deadline instead.
  check(ended.reason == FinishReason::cancelled || spent.count() > 2, "a cancel");
  shelf->release();
  const Report late = collect(*engine->submit(tokens, few_tokens(2)), 1, -1);
  check(late.loaded_tokens > 128, "a second request to load");
}

// Pages that cannot be loaded are computed.
inline void check_damage() {
  for (const bool mistake : {false, true}) {
    const auto shelf = std::make_shared<Shelf>();
    Tokens tokens;
    {
      auto engine = tiered_engine(shelf);
      take_turn(*engine, open_persisting(*engine), tokens, Tokens(200, 7), 4);
    }
    (mistake ? shelf->mistake : shelf->vanish) = 400;
    for (int i = 0; i < 20; ++i) {
      auto engine = tiered_engine(shelf);
      const HandleId handle = open_persisting(*engine);
      Tokens copy = tokens;
      engine->append(handle, copy);
      take_turn(*engine, handle, copy, {1}, 3);
      engine->close(handle);
      check_balance(*engine);
    }
  }
}

// Only a missing or damaged page is computed; the pages after the hole are loaded.
inline void check_gaps() {
  for (const bool torn : {false, true})
    for (const std::vector<int>& windows : {std::vector{0}, std::vector{0, 70}}) {
      scripted::Options script;
      script.windows = windows;
      const auto shelf = std::make_shared<Shelf>();
      const Tokens prompt(400, 7);
      SamplingParams params = few_tokens(2);
      {
        auto engine = tiered_engine(shelf, script);
        collect(*engine->advance(open_persisting(*engine), 0, prompt, params), 1, -1);
      }
      auto engine = tiered_engine(shelf, script);
      const auto keys = engine->page_keys(prompt);
      for (const size_t page : {1, 2, 4}) {
        const Shelf::Name name = Shelf::name(keys[page], 0);
        if (torn)
          shelf->torn.insert(name);
        else
          shelf->items.erase(name);
      }
      Tokens longer = prompt;
      longer.insert(longer.end(), {1, 2, 3});
      const Report report = collect(*engine->submit(longer, params), 1, -1);
      ScriptedReference reference(script);
      check(report.choices[0].tokens == reference.generate(longer, params, 450)[0].tokens,
            "the solo run's tokens after holes");
      const int64_t computed = engine->stats().tokens_prefilled;
      check(computed == 3 * kPageTokens + 3, "three pages and the new tokens to be computed, got " +
                                                 std::to_string(computed) + " tokens");
      check(report.reused_tokens == 400 - 3 * kPageTokens &&
                (torn || report.loaded_tokens == report.reused_tokens),
            "the other pages to be loaded, got " + std::to_string(report.loaded_tokens) + " of " +
                std::to_string(report.reused_tokens));
      check_balance(*engine);
    }
}

// KV of another numerics fingerprint is used and reported, or with exact computed again and
// replaced.
inline void check_foreign() {
  const auto shelf = std::make_shared<Shelf>();
  scripted::Options other;
  other.numerics = "scripted/2";
  Tokens tokens;
  {
    auto engine = tiered_engine(shelf, other);
    take_turn(*engine, open_persisting(*engine), tokens, Tokens(200, 7), 4);
  }
  const int64_t written = static_cast<int64_t>(tokens.size()) - 1;
  auto engine = tiered_engine(shelf);
  const HandleId handle = open_persisting(*engine);
  engine->append(handle, tokens);
  Report report = take_turn(*engine, handle, tokens, Tokens(70, 5), 2);
  check(report.loaded_tokens == written && report.foreign_tokens == written, "foreign KV");
  // KV computed from it counts as foreign too, and is saved again when exact has computed it.
  shelf->held = true;
  report = take_turn(*engine, handle, tokens, Tokens(60, 3), 2);
  check(report.foreign_tokens == report.reused_tokens, "all of it to be still foreign");
  const HandleId second = open_persisting(*engine);
  Tokens again = tokens;
  engine->append(second, again);
  report = take_turn(*engine, second, again, {1}, 2, true);
  check(report.reused_tokens == 0 && report.foreign_tokens == 0, "all to be computed with exact");
  shelf->release();
  again = tokens;
  report = take_turn(*engine, handle, tokens, {1}, 2, true);
  check(report.foreign_tokens == 0 && report.reused_tokens >= 320,
        "the handle to use the KV that exact has computed");
  engine->close(second, true);
  engine->close(handle, true);
  check_balance(*engine);
  engine = tiered_engine(shelf);
  const HandleId third = engine->open();
  engine->append(third, again);
  report = take_turn(*engine, third, again, {1}, 2, true);
  check(report.loaded_tokens >= 320, "the pages that replaced the foreign ones to be loaded");
  engine->close(third);
  check_balance(*engine);
}

// A flush lists pages whose save failed until they are saved or removed.
inline void check_unsaved() {
  const auto shelf = std::make_shared<Shelf>();
  auto engine = tiered_engine(shelf);
  const HandleId handle = open_persisting(*engine);
  Tokens tokens;
  const auto written = [&] { return engine->page_keys({tokens.begin(), tokens.end() - 1}); };
  const auto unsaved = [&] {
    engine->save(handle);
    const auto flush = engine->flush();
    check(flush->wait(60), "saves to end");
    auto keys = flush->unsaved();
    std::sort(keys.begin(), keys.end(), [](auto a, auto b) { return a.lo < b.lo; });
    return keys;
  };
  const auto sorted = [](std::vector<BlockHash> keys) {
    std::sort(keys.begin(), keys.end(), [](auto a, auto b) { return a.lo < b.lo; });
    return keys;
  };
  shelf->refuse = 1000;
  take_turn(*engine, handle, tokens, Tokens(150, 7), 4);
  check(unsaved() == sorted(written()), "three pages to be listed");
  shelf->refuse = 0;
  check(unsaved().empty(), "nothing to be listed once all is saved");
  shelf->refuse = 1000;
  take_turn(*engine, handle, tokens, {1}, 4);
  check(unsaved() == std::vector<BlockHash>{written().back()}, "the unfinished page to be listed");
  shelf->refuse = 0;
  take_turn(*engine, handle, tokens, {1}, 4);
  check(unsaved().empty(), "a page to count as saved when a longer one begins with it");
  shelf->refuse = 1000;
  take_turn(*engine, handle, tokens, {1}, 4);
  check(unsaved().size() == 1, "one page to be listed");
  engine->remove_pages(written());
  const auto flush = engine->flush();
  check(flush->wait(60) && flush->unsaved().empty(), "removed pages not to be listed");
  engine->close(handle);
  check_balance(*engine);
}

// A page that is removed while it is loaded, or promoted to a higher tier, does not reappear.
inline void check_removal() {
  for (int round = 0; round < 12; ++round) {
    const bool copying = round % 2;  // to the upper tier; else reading from the lower one
    const auto upper = std::make_shared<Shelf>(), lower = std::make_shared<Shelf>();
    Tokens tokens;
    {
      auto engine = tiered_engine(lower);
      take_turn(*engine, open_persisting(*engine), tokens, Tokens(copying ? 50 : 100, 7), 4);
    }
    tokens.pop_back();  // that was never computed
    EngineOptions options;
    options.cache_pages = 16;
    TierPtrs tiers;
    for (const auto& shelf : {upper, lower})
      tiers.push_back(std::make_unique<TestTier>(shelf, scripted::Options{}.numerics));
    Engine engine(options, std::make_unique<scripted::ScriptedModel>(scripted::Options{}),
                  std::move(tiers));
    Shelf& held = copying ? *upper : *lower;
    held.held = true;
    const HandleId handle = engine.open();
    engine.append(handle, tokens);
    engine.warm(handle);
    while (held.waiting == 0) std::this_thread::yield();
    engine.remove_pages(engine.page_keys(tokens));
    const Residence soon = engine.residence(tokens);
    check(copying || (soon.device == 0 && soon.tiers.back() == 0),
          "removed pages to be absent at once");
    engine.close(handle);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // for the removal, if it may
    held.release();
    flush(engine);
    for (int i = 0; i < 100 && (upper->waiting > 0 || lower->waiting > 0); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Residence where = engine.residence(tokens);
    check(where.device == 0 && where.tiers[0] == 0 && where.tiers[1] == 0,
          "a page removed while it is loaded not to reappear");
    check_balance(engine);
  }
}

// Sessions that together are far larger than the pool: saved KV is not computed again.
inline void check_many_sessions() {
  const auto shelf = std::make_shared<Shelf>();
  auto engine = tiered_engine(shelf, {}, 6);
  std::vector<std::pair<HandleId, Tokens>> sessions;
  for (int i = 0; i < 8; ++i) sessions.emplace_back(open_persisting(*engine), Tokens{});
  int64_t new_tokens = 0;
  for (int turn = 0; turn < 4; ++turn)
    for (int i = 0; i < 8; ++i) {
      auto& [handle, tokens] = sessions[i];
      const Tokens more(turn == 0 ? 130 : 9, 10 + i);
      const Report report = take_turn(*engine, handle, tokens, more, 5);
      new_tokens += static_cast<int64_t>(more.size()) + (turn > 0);
      engine->save(handle);
      flush(*engine);
    }
  check(engine->stats().tokens_prefilled == new_tokens, "only new tokens to be computed");
  check(engine->stats().tokens_loaded > 0, "pages to be loaded");
  for (const auto& [handle, tokens] : sessions) engine->close(handle);
  check_balance(*engine);
}

}  // namespace turbomind::fuzz
