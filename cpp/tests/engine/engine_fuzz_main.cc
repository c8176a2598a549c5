// Random mixes of requests, cancels, forks and truncates on tiny page pools, with and without lower
// tiers. Every output must equal its solo run, every request must end once, and the pages must
// balance. The scripted model also runs the checks of single rules, the asynchronous one those of
// overlapped steps, a group those of ranks that throw or run out of memory.
//
//   engine_fuzz [mixes] [--seed first] [--model scripted|async|decoder|group|gpus]
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/engine/engine_checks.h"
#include "tests/engine/engine_group_checks.h"
#include "tests/engine/engine_overlap_checks.h"
#include "tests/engine/engine_tier_checks.h"
#include "tests/engine/engine_window_checks.h"
#include "tests/engine/fuzz_client.h"
#include "tests/engine/fuzz_mix.h"
#include "tests/engine/wrapped_allocations.h"

namespace turbomind::fuzz {
namespace {

// Requests that are running when the engine ends still end once.
void check_shutdown(const Mix& mix, Random& random) {
  auto engine = make_engine(mix);
  std::vector<std::shared_ptr<Request>> requests;
  for (int i = 0; i < 6; ++i) requests.push_back(engine->submit(mix.openings[i % 3], {}));
  for (int i = 0; i < 3; ++i)
    requests.push_back(engine->advance(engine->open(), 0, mix.openings[i], {}));
  std::thread late([&] {  // until the engine is closed
    try {
      for (;;) {
        const HandleId handle = engine->open();
        requests.push_back(engine->advance(handle, 0, {1, 2}, {}));
        engine->fork_later(handle);
        engine->close(handle);
        engine->length(engine->open());  // waits, which bounds their number
      }
    } catch (const Error& e) {
      if (e.code() != ErrorCode::closed) std::abort();
    }
  });
  std::this_thread::sleep_for(std::chrono::microseconds(random.in(0, 2000)));
  engine->shutdown();
  late.join();
  try {
    engine->stats();
    check(false, "an error of a closed engine");
  } catch (const Error& e) {
    check(e.code() == ErrorCode::closed, "the error closed");
  }
  engine.reset();
  for (auto& request : requests) collect(*request, 1, -1);
}

// Runs clients that continue with the sequences of the previous engine's clients.
void run_clients(const Mix& mix, Random& random, std::vector<std::vector<Tokens>>& closed) {
  const auto engine = make_engine(mix);
  const int64_t max_context = engine->stats().max_context;
  std::vector<std::thread> threads;
  std::vector<std::string> failures(closed.size());
  for (size_t i = 0; i < failures.size(); ++i)
    threads.emplace_back([&, i, client_seed = static_cast<uint64_t>(random.in(0, 1 << 30))] {
      try {
        Client client(mix, *engine, max_context, client_seed);
        client.closed = closed[i];
        client.run(mix.actions);
        closed[i] = client.closed;
      } catch (const std::exception& e) {
        failures[i] = e.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures) check(failure.empty(), "expected " + failure);
  check_balance(*engine);
}

// Checks of the engine with any model.
void check_rules(uint64_t seed) {
  check_siphash();
  check_failing_step();
  check_failing_copy();
  check_sharing();
  check_no_waiting();
  check_advance();
  check_priority();
  check_reprioritize();
  check_reprioritize_storm();
  check_cancel();
  check_cancel_choice();
  check_cancel_storm();
  check_extremes();
  check_coming_back();
  check_offload();
  check_set_aside();
  check_damage();
  check_gaps();
  check_foreign();
  check_unsaved();
  check_removal();
  check_many_sessions();
  check_windows();
  Random random(seed);
  check_preemption(random);
  for (const bool cancels : {false, true})
    for (const int prompt_tokens : {50, 70, 400})
      for (const int new_tokens : {1, 3})
        check_prefix_in_flight(cancels, prompt_tokens, new_tokens);
  check_hysteresis();
  check_ageing();
}

int64_t faults = 0;  // steps of all mixes that one of them has ended

void run_mix(uint64_t seed, Kind kind) {
  current_seed = seed;
  Random random(seed);
  Mix mix = make_mix(random, kind);
  std::vector<std::vector<Tokens>> closed(random.in(1, 4));
  run_clients(mix, random, closed);
  if (mix.make_tiers) {
    if (!is_decoder(kind) && random.one_in(2)) {
      mix.script.numerics = "scripted/2";
      mix.make_model = [script = mix.script] { return make_scripted(script); };
    }
    if (mix.trouble) mix.trouble(random);
    run_clients(mix, random, closed);
  }
  check_shutdown(mix, random);
  if (!mix.faults) return;
  check(mix.faults->without_effect == 0, "a step with a fault to fail");
  faults += mix.faults->happened;
}

}  // namespace
}  // namespace turbomind::fuzz

int main(int argc, char** argv) {
  using namespace turbomind::fuzz;
  long mixes = 100;
  uint64_t first = 1;
  Kind kind = Kind::scripted;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--seed" && i + 1 < argc) {
      first = std::strtoull(argv[++i], nullptr, 10);
    } else if (arg == "--model" && i + 1 < argc) {
      const std::string name = argv[++i];
      kind = name == "decoder" ? Kind::decoder
             : name == "group" ? Kind::group
             : name == "gpus"  ? Kind::gpus
             : name == "async" ? Kind::async
                               : Kind::scripted;
    } else {
      mixes = std::strtol(arg.c_str(), nullptr, 10);
    }
  }
  uint64_t seed = first;
  try {
    if (kind == Kind::scripted) check_rules(first);
    if (kind == Kind::async) check_ahead();
    if (kind == Kind::group) {
      for (const int ranks : {2, 4}) check_every_op(ranks);
      check_every_allocation(Fault::allocation, 2);
      check_every_allocation(Fault::mapping, 2);
    }
    for (; seed < first + mixes; ++seed) run_mix(seed, kind);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "engine_fuzz: mix with --seed %llu failed: %s\n",
                 static_cast<unsigned long long>(seed), e.what());
    return 1;
  }
  std::printf("engine_fuzz: %ld mixes from seed %llu passed\n", mixes,
              static_cast<unsigned long long>(first));
  if (kind == Kind::group || kind == Kind::gpus)
    std::printf("%lld steps failed by faults\n", static_cast<long long>(faults));
  return 0;
}
