// Steps of a whole decoder whose kernels start long before their inputs are written: with
// "--gpu", and folders of cuBLASLt, on a GPU of compute capability 9.0 each kernel is preceded by
// one that ends late (cuda/launch_delay.h), so that a missing wait changes results. In emulation,
// which reports such kernels itself, the delays have no effect.
#include <cstdio>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/gpu_context.h"
#include "cuda/launch_delay.h"
#include "tests/check.h"
#include "tests/model/small_decoder.h"

namespace turbomind {
namespace {

using Logits = std::vector<std::vector<float>>;

struct Delay {
  explicit Delay(int microseconds) { set_launch_delay(microseconds); }
  ~Delay() { set_launch_delay(0); }
};

// Prompts, chunks, decode steps that are captured and replayed, and mixtures.
Logits steps(Model& model) {
  Bench bench(model, 3, 1300);
  Logits logits;
  const auto step = [&](const std::vector<int64_t>& lengths) {
    logits.push_back(bench.step(lengths));
  };
  step({90, 3, 20}), step({70, 1, 1}), step({1, 40, 0});
  for (int i = 0; i < 4; ++i) step({1, 1, 1}), step({1, 0, 0});
  bench.all_to(1100);  // attention in several parts, which are merged
  for (int i = 0; i < 4; ++i) step({1, 1, 1});
  step({20, 1, 0});
  return logits;
}

// Returns greedy and other tokens of steps that take their input from the step before.
std::vector<int32_t> sampled(Model& model) {
  model.pages().allocate_pages(std::vector<int64_t>(model.groups().size(), 2));
  StepOutputs& outputs = *model.outputs();
  const std::vector<int32_t> table = {0, 1};
  StepBatch batch;
  batch.token_ids = batch.positions = {0};
  batch.sample_rows = {0};
  batch.rows.resize(1);
  batch.rows[0].q_len = 1;
  batch.rows[0].pages.assign(model.groups().size(), table.data());
  std::vector<int32_t> tokens;
  for (int i = 0; i < 60; ++i) {
    batch.rows[0].kv_begin = batch.positions[0] = i;
    if (i > 0) batch.token_from = {0};
    model.forward(batch, nullptr, nullptr);
    SampleRow row;
    row.logits_row = row.out = 0;
    row.temperature = i % 2 == 0 ? 0.0f : 1.5f;
    row.top_k = 40;
    row.top_p = 0.9f;
    outputs.submit_sample(&row, 1);
    outputs.read_tokens(&tokens.emplace_back());
  }
  return tokens;
}

void check_delays(bool deterministic) {
  bool overlaps = false;
  const auto make = [&](bool overlap) {
    auto model = make_model(small_config(), true, deterministic);
    overlaps = model->context().gpu->gpu().set_overlap(overlap);
    return model;
  };
  const Logits logits = steps(*make(false));
  const std::vector<int32_t> tokens = sampled(*make(false));
  const std::vector<int> delays = real ? std::vector<int>{0, 5, 100, 400} : std::vector<int>{100};
  for (const int microseconds : delays) {
    const Delay delay(microseconds);
    const std::string text = std::to_string(microseconds) + " microseconds";
    // A new model each time, so that the delays are in its captured steps too.
    EXPECT(steps(*make(true)) == logits, "logits, " + text);
    EXPECT(sampled(*make(true)) == tokens, "tokens, " + text);
  }
  if (!overlaps) std::printf("kernels do not overlap here: the delays had no effect\n");
}

void test_delayed_inputs() {
  check_delays(false);
}

void test_delayed_inputs_deterministic() {
  check_delays(true);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  std::vector<std::string> arguments;
  std::tie(library_folders, arguments) = split_folders(read_arguments(argc, argv));
  return run_cases(arguments,
                   {TM_CASE(test_delayed_inputs), TM_CASE(test_delayed_inputs_deterministic)},
                   &failures);
}
