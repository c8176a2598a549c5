// Allocations fail on the engine thread, one after another: every request still ends once, the
// pages balance, and the engine serves the next request.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>

#include "tests/check.h"
#include "tests/engine/async_model.h"
#include "tests/engine/engine_checks.h"
#include "tests/tiers/test_tier.h"

namespace {

thread_local bool exempt = false;        // the thread of the clients: its allocations succeed
std::atomic<int64_t> allocations{0};     // of other threads
std::atomic<int64_t> first{0}, last{0};  // numbers of the allocations that fail

}  // namespace

// Not inlined: compilers would match inlined parts with their own new and delete.
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (!exempt) {
    const int64_t number = ++allocations;
    if (number >= first && number < last) throw std::bad_alloc();
  }
  if (void* p = std::malloc(bytes > 0 ? bytes : 1)) return p;
  throw std::bad_alloc();
}
// Temporary buffers, whose users handle nullptr.
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void operator delete(void* p) noexcept {
  std::free(p);
}
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept {
  std::free(p);
}

namespace turbomind::fuzz {
namespace {

// Returns whether the error may follow from lack of memory: not_found is that of a handle that
// could not be opened.
bool expected(ErrorCode code) {
  return code == ErrorCode::internal || code == ErrorCode::not_found;
}

// Makes a call that may fail for lack of memory. Returns whether it succeeded.
template <typename F>
bool attempt(F&& f) {
  try {
    f();
    return true;
  } catch (const Error& e) {
    check(expected(e.code()), std::string("another error than ") + e.what());
    return false;
  }
}

void check_outcome(Request& request, const SamplingParams& params, const Tokens& prompt,
                   ScriptedReference& reference) {
  const auto want = reference.generate(prompt, params, 256);
  const Report report = collect(request, params.n, -1);
  for (int i = 0; i < params.n; ++i) {
    const Outcome& got = report.choices[i];
    check(got.tokens.size() <= want[i].tokens.size() &&
              std::equal(got.tokens.begin(), got.tokens.end(), want[i].tokens.begin()),
          "the tokens of the solo run");
    check(got.reason == want[i].reason ||
              (got.reason == FinishReason::error && expected(got.error_code)),
          "the solo run's end or an internal error, got: " + got.error);
  }
}

// advance() does everything, or the handle is unchanged.
void advance(Engine& engine, HandleId handle, const Tokens& prompt, const SamplingParams& params,
             ScriptedReference& reference) {
  Tokens before, after;
  if (!attempt([&] { before = engine.token_ids(handle); })) return;
  const int64_t prefix_length = static_cast<int64_t>(before.size()) / 2;
  Tokens whole(before.begin(), before.begin() + prefix_length);
  whole.insert(whole.end(), prompt.begin(), prompt.end());
  const auto request = engine.advance(handle, prefix_length, prompt, params);
  const auto want = reference.generate(whole, params, 256)[0];
  const Outcome got = collect(*request, 1, -1).choices[0];
  check(got.tokens.size() <= want.tokens.size() &&
            std::equal(got.tokens.begin(), got.tokens.end(), want.tokens.begin()),
        "the tokens of the solo run after advance()");
  check(
      got.reason == want.reason || (got.reason == FinishReason::error && expected(got.error_code)),
      "the solo run's end or an internal error after advance(), got: " + got.error);
  if (!attempt([&] { after = engine.token_ids(handle); })) return;
  whole.insert(whole.end(), got.tokens.begin(), got.tokens.end());
  // The error of a request that could not be started.
  const bool begun = got.error != "out of memory" && got.error_code != ErrorCode::not_found;
  check(after == (begun ? whole : before), "all of advance() or nothing, got: " + got.error);
}

void use_handle(Engine& engine, const Tokens& prompt, const SamplingParams& params,
                ScriptedReference& reference) {
  const HandleId handle = engine.open();
  std::shared_ptr<Request> request;
  if (attempt([&] { engine.append(handle, prompt); }))
    attempt([&] { request = engine.generate(handle, params); });
  const HandleId copy = engine.fork_later(handle);
  if (request) check_outcome(*request, params, prompt, reference);
  attempt([&] { engine.truncate(handle, engine.length(handle) / 2); });
  advance(engine, handle, prompt, params, reference);
  engine.close(copy);
  engine.close(handle);
}

// A session is saved, evicted and loaded again.
void reload(Engine& engine, const Tokens& prompt, const SamplingParams& params,
            ScriptedReference& reference) {
  HandleOptions persisting;
  persisting.persist = true;
  for (int turn = 0; turn < 3; ++turn) {
    const HandleId handle = engine.open(persisting);
    if (turn > 0) engine.warm(handle);
    std::shared_ptr<Request> request;
    if (attempt([&] { engine.append(handle, prompt); })) {
      if (turn > 1) engine.warm(handle);
      attempt([&] { request = engine.generate(handle, params); });
    }
    if (request) check_outcome(*request, params, prompt, reference);
    attempt([&] { engine.save(handle); });
    engine.close(handle, true);
    attempt([&] { engine.flush()->wait(10); });
    attempt([&] { engine.evict(); });
  }
}

// async: with overlapped steps and a model that allocates.
enum class Setup { plain, tiered, async };

// Runs a scenario in which allocations `from` to `from + count - 1` of other threads fail, also of
// those that move pages. Returns false when there were fewer allocations.
bool run(int64_t from, int64_t count, Setup setup) {
  EngineOptions options;
  options.cache_pages = 4;
  TierPtrs tiers;
  const bool tiered = setup == Setup::tiered;
  if (tiered) tiers.push_back(std::make_unique<TestTier>(std::make_shared<Shelf>(), "scripted/1"));
  scripted::Options script;
  script.asynchronous = setup == Setup::async;
  std::unique_ptr<Model> model;
  if (script.asynchronous)
    model = std::make_unique<scripted::AsyncModel>(script);
  else
    model = std::make_unique<scripted::ScriptedModel>(script);
  Engine engine(options, std::move(model), std::move(tiers));
  ScriptedReference reference{script};
  allocations = 0;
  last = from + count;
  first = from;
  const auto waker = std::make_shared<Waker>();
  SamplingParams params;
  params.max_new_tokens = 20;
  std::vector<std::shared_ptr<Request>> requests;
  const Tokens prompt(70, 7);
  for (int n : {1, 3, 1}) {
    params.n = n;
    requests.push_back(engine.submit(prompt, params, {}, waker));
  }
  SamplingParams one = params;
  one.n = 1;
  use_handle(engine, prompt, one, reference);
  if (tiered) reload(engine, prompt, one, reference);
  for (size_t i = 0; i < requests.size(); ++i) {
    params.n = i == 1 ? 3 : 1;
    check_outcome(*requests[i], params, prompt, reference);
  }
  const bool reached = allocations >= from;
  first = last = 0;
  check_balance(engine);
  const auto after = collect(*engine.submit(prompt, one), 1, -1).choices[0];
  check(after.tokens == reference.generate(prompt, one, 256)[0].tokens,
        "the next request's tokens");
  check_balance(engine);
  return reached;
}

// Lets every `step`-th allocation fail, alone and with those that follow it.
void check_setup(Setup setup, int64_t step) {
  exempt = true;
  for (const int64_t count : {1, 2, 5, 40}) {
    int64_t from = 1;
    try {
      while (run(from, count, setup)) from += (count < 5 ? 3 : 7) * step;
    } catch (const std::exception& e) {
      throw std::runtime_error(std::string(e.what()) + ", allocation " + std::to_string(from));
    }
  }
}

}  // namespace
}  // namespace turbomind::fuzz

int main(int argc, char** argv) {
  using namespace turbomind::fuzz;
  return turbomind::run_cases(argc, argv,
                              {
                                  {"plain", [] { check_setup(Setup::plain, 1); }},
                                  {"tiered", [] { check_setup(Setup::tiered, 5); }},
                                  {"async", [] { check_setup(Setup::async, 2); }},
                              });
}
