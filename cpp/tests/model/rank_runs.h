// Groups of ranks on GPUs, emulated ones or with "--gpu" the first real one, and what drivers run
// on them.
#pragma once

#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "cuda/gpu_context.h"
#include "model/decoder/decoder_builder.h"
#include "tests/check.h"
#include "tests/cuda/driver_gpu.h"
#include "tests/model/rank_models.h"

namespace turbomind {

// While one lives, groups are built whose ranks on one GPU wait for each other (GpuSwitches).
class RankWaits {
 public:
  explicit RankWaits(bool on = true) { setenv(kName, on ? "1" : "0", 1); }
  ~RankWaits() { unsetenv(kName); }
  RankWaits(const RankWaits&) = delete;
  RankWaits& operator=(const RankWaits&) = delete;

 private:
  static constexpr const char* kName = "TM_CUDA_RANK_WAITS";
};

inline std::vector<GpuOptions> gpus(const std::vector<int>& indices) {
  std::vector<GpuOptions> all;
  for (const int index : indices) {
    GpuOptions& gpu = all.emplace_back();
    gpu.kind = kind();
    gpu.deterministic = true;
    gpu.index = index;
  }
  return all;
}

inline std::unique_ptr<Model> build(const ModelConfig& config, const std::vector<int>& indices) {
  DecoderBuilder builder(config, Isa::portable, 1, gpus(indices),
                         std::max<int>(1, static_cast<int>(indices.size())));
  builder.fill_dummy(3);
  return builder.finish(true);
}

inline std::vector<int> first(int ranks) {
  std::vector<int> indices(ranks);
  std::iota(indices.begin(), indices.end(), 0);
  return indices;
}

inline ModelConfig small_gpu(int kv_heads = 2) {
  return small(kv_heads, "bfloat16");
}

// Has memory for all that these drivers run, so that the second step of each kind is like any later
// one: the first is computed in turns.
inline void reserve(Model& model) {
  model.reserve({kTokens, 3, kTokens, 400, 3});
}

// Two chunks of a prompt, then single tokens, which are captured and replayed.
inline std::vector<float> prompt_and_tokens(Model& model) {
  reserve(model);
  Bench bench(model);
  std::vector<float> logits;
  for (const int count : {20, 20, 1, 1, 1, 1}) {
    const std::vector<float> next = bench.step({count});
    logits.insert(logits.end(), next.begin(), next.end());
  }
  return logits;
}

// Greedy tokens of `count` sequences, each step submitted before the tokens of the last are read.
inline std::vector<int32_t> sampled(Model& model, int count, int steps) {
  model.pages().allocate_pages(std::vector<int64_t>(model.groups().size(), count));
  std::vector<std::vector<int32_t>> tables(count);
  StepBatch batch;
  std::vector<SampleRow> rows(count);
  std::vector<int32_t> all, tokens(count);
  StepOutputs& outputs = *model.outputs();
  for (int step = 0; step < steps; ++step) {
    const int length = step == 0 ? 5 : 1;
    batch = {};
    for (int s = 0; s < count; ++s) {
      tables[s] = {s};
      StepRow& row = batch.rows.emplace_back();
      row.q_begin = static_cast<int64_t>(batch.token_ids.size());
      row.q_len = length;
      row.kv_begin = step == 0 ? 0 : 4 + step;
      row.pages.assign(model.groups().size(), tables[s].data());
      for (int i = 0; i < length; ++i) {
        batch.token_ids.push_back(step == 0 ? 7 * s + i : 0);
        batch.positions.push_back(static_cast<int32_t>(row.kv_begin + i));
        if (step > 0) batch.token_from.push_back(s);
      }
      batch.sample_rows.push_back(static_cast<int32_t>(batch.token_ids.size() - 1));
      rows[s].logits_row = rows[s].out = s;
      rows[s].temperature = 0;
    }
    model.forward(batch, nullptr, nullptr);
    outputs.submit_sample(rows.data(), count);
    if (step == 0) continue;
    outputs.read_tokens(tokens.data());
    all.insert(all.end(), tokens.begin(), tokens.end());
  }
  outputs.read_tokens(tokens.data());
  all.insert(all.end(), tokens.begin(), tokens.end());
  return all;
}

// Throws before some op of a step.
class Thrower final : public DeviceTimer {
 public:
  explicit Thrower(int op) : left_(op) {}
  void begin() override {
    if (left_-- == 0) throw_error(ErrorCode::model, "this rank was asked to fail");
  }
  void end(Op) noexcept override {}
  void collect(OpStats&) override {}

 private:
  int left_;
};

// The step fails with the rank's error, wherever that is, the one before it does not, and the next
// one runs. The first profiled step is computed in turns, as is that after an error.
inline void check_a_rank_that_throws(const std::vector<int>& indices) {
  const auto group = build(small_gpu(), indices);
  reserve(*group);
  const auto run = [&] { return Bench(*group).step({20}); };
  const std::vector<float> want = run();
  for (const auto& [rank, op] : {std::pair{0, 0}, {1, 3}, {0, 20}, {1, 20}}) {
    Profiler& profiler = group->contexts()[rank]->profiler;
    profiler.enabled = true;
    if (op > 0) run();
    Thrower thrower(op);
    DeviceTimer* const timer = std::exchange(profiler.device, &thrower);
    std::string error;
    try {
      run();
    } catch (const Error& e) {
      error = e.what();
    }
    CHECK(error == "this rank was asked to fail", "%s", error.c_str());
    profiler.enabled = false;
    profiler.device = timer;
    for (int i = 0; i < 2; ++i) CHECK(same_bits(run(), want), "after op %d of rank %d", op, rank);
  }
}

}  // namespace turbomind
