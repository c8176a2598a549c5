// An engine on a GPU: a warm-up captures and allocates everything beforehand, and a GPU that fails
// ends requests, leaves no KV in the cache and lets the engine close. On the emulated GPU, or with
// "--gpu" and folders of cuBLASLt on the first real one, which is not made to fail and whose
// captures are not counted.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "cuda/emulated_gpu.h"
#include "cuda/gpu_context.h"
#include "engine/engine.h"
#include "tests/check.h"
#include "tests/model/small_decoder.h"

namespace turbomind {
namespace {

constexpr double kPatience = 60;  // seconds, for what takes almost none
const StepLimits kMost{96 + 5, 5, 40, 1200};

struct Reply {
  std::vector<int32_t> tokens;
  FinishReason reason = FinishReason::none;
  std::string error;
};

// Reads a request until it ends or has `most` tokens.
Reply read(Request& request, size_t most = 1 << 20) {
  Reply reply;
  while (reply.reason == FinishReason::none && reply.tokens.size() < most) {
    if (!request.wait(kPatience)) {
      fail("a request does not end");
      break;
    }
    for (const Event& event : request.drain()) {
      reply.tokens.insert(reply.tokens.end(), event.token_ids.begin(), event.token_ids.end());
      if (event.finish != FinishReason::none) reply.reason = event.finish;
      if (!event.error.empty()) reply.error = event.error;
    }
  }
  return reply;
}

SamplingParams greedy(int64_t tokens) {
  SamplingParams params;
  params.max_new_tokens = tokens;
  params.temperature = 0;
  params.ignore_eos = true;
  return params;
}

std::unique_ptr<Model> reserved_model() {
  auto model = make_model(small_config());
  model->reserve(kMost);
  return model;
}

// Runs decode steps of every number of sequences with every number of pages, with prompts between
// them.
std::vector<std::vector<float>> steps(Bench& bench) {
  std::vector<std::vector<float>> logits;
  const std::vector<std::vector<int64_t>> sequences = {
      {1, 0, 0, 0, 0}, {1, 1, 0, 0, 0}, {1, 1, 1, 0, 0}, {1, 1, 1, 1, 0}, {1, 1, 1, 1, 1}};
  for (const int64_t past : {3, 700, 1190}) {
    bench.all_to(past);
    for (const auto& lengths : sequences) logits.push_back(bench.step(lengths));
  }
  bench.all_to(0);
  logits.push_back(bench.step({90, 1, 0, 0, 0}));
  return logits;
}

void test_nothing_is_left_for_first_steps() {
  const auto warm = reserved_model(), cold = reserved_model();
  Bench on_warm(*warm, 5, kMost.keys), on_cold(*cold, 5, kMost.keys);
  const WarmUp done = warm->warm_up(kMost, 1e9);
  EXPECT(done.of >= 12 && done.done == done.of, "every kind of step was run");
  on_warm.clear();
  const int64_t captured = emulator::captures(), allocated = emulator::allocations();
  const auto logits = steps(on_warm);
  EXPECT(real || emulator::captures() == captured, "a step that was warmed up was captured again");
  EXPECT(real || emulator::allocations() == allocated, "a step that was warmed up has allocated");
  EXPECT(logits == steps(on_cold), "the bits of a model that was not warmed up");
  EXPECT(real || emulator::captures() > captured, "a cold model captures the same steps now");
}

void test_a_warm_up_ends() {
  const auto model = reserved_model();
  Bench bench(*model, 5, 200);
  const WarmUp done = model->warm_up(kMost, 0);
  EXPECT(done.done == 0 && done.of > 0, "no time: nothing was run");
  const std::string note = model->context().gpu->library_note();
  EXPECT(note.find("warmed up for 0 of ") != std::string::npos, "noted: " + note);
  bench.step({9, 1, 0, 0, 0});
  const auto cpu = make_model(small_config(), false);
  EXPECT(cpu->warm_up(kMost, 1).of == 0, "nothing to warm up on the CPU");
}

void test_engines() {
  std::vector<std::vector<int32_t>> tokens;
  for (const bool warm_up : {false, true}) {
    EngineOptions options;
    options.cache_pages = 6;  // fewer than the model's context
    options.prefill_chunk = 64;
    options.max_batch_size = 2;
    options.warm_up = warm_up;
    Engine engine(options, make_model(small_config()));
    const WarmUp& done = engine.warmed_up();
    EXPECT(warm_up == (done.of > 0), "warmed up where it was asked for");
    const int64_t captured = emulator::captures();
    const auto request = engine.submit(std::vector<int32_t>(100, 7), greedy(20));
    tokens.push_back(read(*request).tokens);
    const bool complete = warm_up && done.done == done.of;  // on a slow machine it is not
    EXPECT(real || !complete || emulator::captures() == captured, "captured beforehand");
    const Stats stats = engine.stats();
    EXPECT(stats.tokens_prefilled == 100 && stats.tokens_decoded == 20, "none of it is counted");
    engine.check_invariants();
  }
  EXPECT(tokens[0].size() == 20 && tokens[0] == tokens[1], "the same tokens");
}

// Sets an environment variable until its end.
struct Variable {
  const char* name;
  Variable(const char* n, const char* value) : name(n) { setenv(name, value, 1); }
  ~Variable() { unsetenv(name); }
};

// Neither switch changes a token; each switches off what it names and nothing else.
void test_switches() {
  struct Run {
    std::vector<int32_t> tokens;
    int64_t overlapped = 0, captured = 0;
    std::string note;
  };
  const auto run = [](const char* overlap, const char* graphs) {
    const Variable first("TM_CUDA_OVERLAP", overlap), second("TM_CUDA_GRAPHS", graphs);
    EngineOptions options;
    options.cache_pages = 6;
    options.prefill_chunk = 64;
    options.warm_up = false;
    auto model = make_model(small_config());
    GpuContext& gpu = *model->context().gpu;
    Engine engine(options, std::move(model));
    const int64_t before = emulator::captures();
    Run found;
    found.tokens = read(*engine.submit(std::vector<int32_t>(100, 7), greedy(20))).tokens;
    found.captured = emulator::captures() - before;
    found.overlapped = engine.stats().steps_overlapped;
    found.note = gpu.library_note();
    return found;
  };
  const Run both = run("", "1"), no_overlap = run("0", ""), no_graphs = run("1", "0");
  EXPECT(both.tokens.size() == 20 && both.tokens == no_overlap.tokens &&
             both.tokens == no_graphs.tokens,
         "the same tokens");
  EXPECT(both.overlapped > 0 && no_graphs.overlapped > 0, "steps overlap");
  EXPECT(no_overlap.overlapped == 0, "no step is submitted while another one is in flight");
  EXPECT(real || (both.captured > 0 && no_overlap.captured > 0), "steps are captured");
  EXPECT(real || no_graphs.captured == 0, "no step is captured");
  const auto has = [](const Run& r, const char* text) {
    return r.note.find(text) != std::string::npos;
  };
  EXPECT(!has(both, "TM_CUDA"), "nothing is switched off: " + both.note);
  EXPECT(has(no_overlap, "; TM_CUDA_OVERLAP is 0") && !has(no_overlap, "GRAPHS"), no_overlap.note);
  EXPECT(has(no_graphs, "; TM_CUDA_GRAPHS is 0") && !has(no_graphs, "OVERLAP"), no_graphs.note);
}

void test_unknown_values_of_switches() {
  for (const std::string name : {"TM_CUDA_OVERLAP", "TM_CUDA_GRAPHS", "TM_CUDA_RANK_WAITS"}) {
    const Variable variable(name.c_str(), "off");
    const char* const otherwise = name == "TM_CUDA_RANK_WAITS" ? "0" : "1";
    std::string error;
    try {
      make_model(small_config());
    } catch (const Error& e) {
      error = e.what();
    }
    EXPECT(error == "the environment variable " + name +
                        " is \"off\", expected 0 (off) or 1 (on); the default is " + otherwise,
           error);
  }
}

// A failed kernel makes every later call fail.
void test_a_gpu_that_goes_wrong() {
  EngineOptions options;
  options.cache_pages = 40;
  options.prefill_chunk = 64;
  options.host_bytes = 1 << 20;
  Engine engine(options, make_model(small_config()));
  HandleOptions persistent;
  persistent.persist = true;
  const HandleId handle = engine.open(persistent);
  engine.append(handle, std::vector<int32_t>(70, 5));
  read(*engine.generate(handle, greedy(1)));
  const std::string why = "the GPU was asked to fail";
  Reply broken;
  for (int i = 0; i < 10 && broken.reason != FinishReason::error;
       ++i) {  // one that has not ended yet
    emulator::set_device_fails(false);
    const auto running = engine.submit({1, 2, 3}, greedy(2000));
    read(*running, 3);
    emulator::set_device_fails(true);
    broken = read(*running);
  }
  EXPECT(broken.reason == FinishReason::error && broken.error == why,
         "the reason: " + broken.error);
  for (const auto& request : {engine.submit({4}, greedy(3)), engine.generate(handle, greedy(3))}) {
    const Reply later = read(*request);
    EXPECT(later.reason == FinishReason::error && later.error == why, "and later: " + later.error);
  }
  engine.save(handle);
  EXPECT(engine.flush()->wait(kPatience), "saves end");
  engine.check_invariants();
  emulator::set_device_fails(false);  // no real GPU recovers; the state of the engine must be sound
  EXPECT(read(*engine.generate(handle, greedy(3))).tokens.size() == 3,
         "nothing but the GPU failed");
  emulator::set_device_fails(true);
  engine.close(handle, true);
  engine.shutdown();
  emulator::set_device_fails(false);
}

// Calls that are forbidden while a thread captures, even on other streams.
void test_rules_of_captures() {
  const auto gpu = open_gpu(GpuKind::emulated, 0);
  const GpuStream stream(*gpu), other(*gpu);
  const GpuEvent event(*gpu);
  event.record(other);
  const auto refused = [&](const std::function<void()>& call) {
    try {
      GpuGraph(stream, call);
    } catch (const std::exception& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const auto expect = [&](const char* words, const std::string& message) {
    EXPECT(message.find(words) != std::string::npos, std::string(words) + ", got: " + message);
  };
  expect("query: a stream is being captured", refused([&] { event.query(); }));
  expect("synchronize: a stream is being captured", refused([&] { event.synchronize(); }));
  expect("synchronize: a stream is being captured", refused([&] { other.synchronize(); }));
  DeviceBuffer buffer(*gpu, 16);
  expect("memory was freed meanwhile", refused([&] { buffer = DeviceBuffer(); }));
  expect("", refused([] {}));
  EXPECT(refused([] {}).empty(), "the calls succeed after the capture");
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  std::vector<std::string> arguments;
  std::tie(library_folders, arguments) = split_folders(read_arguments(argc, argv));
  std::vector<TestCase> cases = {
      TM_CASE(test_nothing_is_left_for_first_steps),
      TM_CASE(test_a_warm_up_ends),
      TM_CASE(test_engines),
      TM_CASE(test_switches),
      TM_CASE(test_unknown_values_of_switches),
  };
  // These cases need faults that only the emulator can inject.
  if (real == nullptr)
    cases.insert(cases.begin(), {
                                    TM_CASE(test_a_gpu_that_goes_wrong),
                                    TM_CASE(test_rules_of_captures),
                                });
  return run_cases(arguments, cases, &failures);
}
