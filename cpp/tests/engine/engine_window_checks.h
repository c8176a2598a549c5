// Checks of engines whose windows have fewer pages than full attention.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cache/pool_sizes.h"
#include "tests/engine/engine_checks.h"

namespace turbomind::fuzz {

inline scripted::Options windowed(int window) {
  scripted::Options script;
  script.windows = {0, window};
  script.max_context = 20000;
  return script;
}

// A sequence may fill the pages of full attention, whatever else runs, though it needs many times
// the pages of its window.
inline void check_long_sequence() {
  EngineOptions options;
  options.cache_pages = 60;
  options.max_batch_size = 2;
  options.prefill_chunk = 128;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(windowed(70)));
  const std::vector<GroupStats> groups = engine.stats().groups;
  check(groups.size() == 2 && groups[0].total == 60 && groups[0].window == 0, "60 pages");
  check(groups[1].total < 30 && groups[1].window == 70, "fewer pages for the window");
  check(engine.stats().max_context == 60 * kPageTokens, "a context of 60 pages");
  ScriptedReference reference(windowed(70));
  SamplingParams params;
  params.max_new_tokens = 3;
  const Tokens prompt(60 * kPageTokens - 3, 7), other(150, 8);
  const auto longest = engine.submit(prompt, params), beside = engine.submit(other, params);
  check(collect(*longest, 1, -1).choices[0].tokens ==
            reference.generate(prompt, params, 20000)[0].tokens,
        "the tokens of the solo run");
  check(collect(*beside, 1, -1).choices[0].tokens ==
            reference.generate(other, params, 20000)[0].tokens,
        "the tokens of the solo run beside it");
  check_balance(engine);
}

// One dialogue after another goes back in its last turn as a session does it: the handle is forked
// for the old branch, then advanced. At most a page of the tokens before is computed again, though
// many times the pages of a window were used since.
inline void check_last_turn_again(int window, bool forks) {
  EngineOptions options;
  options.cache_pages = 140;
  options.max_batch_size = 2;
  options.prefill_chunk = 128;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(windowed(window)));
  ScriptedReference reference(windowed(window));
  Random random(window);
  HandleOptions session;
  session.retention_priority = 1;
  const HandleId handle = engine.open(session);
  Tokens tokens;
  std::vector<HandleId> branches;
  const auto turn = [&](int64_t prefix, int64_t added, int64_t generated, int64_t continued = 0) {
    if (forks && prefix < static_cast<int64_t>(tokens.size()))
      branches.push_back(engine.fork_later(handle, 0.25f));
    tokens.resize(prefix);
    Tokens more;
    for (; added > 0; --added) more.push_back(static_cast<int32_t>(random.in(0, 60)));
    tokens.insert(tokens.end(), more.begin(), more.end());
    SamplingParams params;
    params.max_new_tokens = generated;
    params.continued = continued;
    const Report report = collect(*engine.advance(handle, prefix, more, params), 1, -1);
    const Tokens& reply = report.choices[0].tokens;
    check(reply == reference.generate(tokens, params, 20000)[0].tokens, "solo tokens");
    tokens.insert(tokens.end(), reply.begin(), reply.end());
    // Stateless requests beside it use every page of the window.
    SamplingParams one;
    one.max_new_tokens = 1;
    for (int i = 0; i < 3; ++i)
      collect(*engine.submit(Tokens(400, static_cast<int32_t>(random.in(0, 60))), one), 1, -1);
    engine.check_invariants();
    const int64_t lost = prefix - report.reused_tokens;
    return lost;
  };
  const auto expect_little = [&](int64_t lost, const char* what) {
    check(lost <= kPageTokens, std::string(what) + " to compute at most a page again, got " +
                                   std::to_string(lost) + " tokens, window " +
                                   std::to_string(window));
  };
  turn(0, 500, 100);
  for (int round = 0; round < 3; ++round) {
    const auto begin = static_cast<int64_t>(tokens.size());
    turn(begin, 100 + 61 * round, 600);
    const int64_t reply = begin + 100 + 61 * round;
    expect_little(turn(reply, 0, 700), "a retry");
    expect_little(turn(begin, 90, 500), "an undo, then a send");
    expect_little(turn(begin + 5, 333, 500), "an edit of the question");
    const auto end = static_cast<int64_t>(tokens.size());
    expect_little(turn(end, 0, 400, end - begin - 338), "a reply that is continued");
    expect_little(turn(begin + 338, 0, 300), "a retry of the continued reply");
    for (const HandleId branch : branches) engine.close(branch);
    branches.clear();
  }
  engine.close(handle);
  check_balance(engine);
}

// The same of a handle that append() and generate() continue.
inline void check_last_turn_by_generate() {
  EngineOptions options;
  options.cache_pages = 60;
  options.max_batch_size = 1;
  options.prefill_chunk = 64;
  Engine engine(options, std::make_unique<scripted::ScriptedModel>(windowed(100)));
  const HandleId handle = engine.open();
  SamplingParams params;
  const auto turn = [&](Tokens more, int64_t generated) {
    engine.append(handle, more);
    params.max_new_tokens = generated;
    return collect(*engine.generate(handle, params), 1, -1).reused_tokens;
  };
  turn(Tokens(300, 7), 70);
  turn(Tokens(90, 8), 900);
  engine.truncate(handle, 370);
  check(turn(Tokens(50, 9), 3) >= 320, "the turns before the last one");
  engine.close(handle);
  check_balance(engine);
}

inline void check_windows() {
  check_long_sequence();
  for (const bool forks : {false, true})
    for (const int window : {1, 64, 100, 200}) check_last_turn_again(window, forks);
  check_last_turn_by_generate();
}

}  // namespace turbomind::fuzz
