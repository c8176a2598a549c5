#include "model/device/device_warm_up.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <vector>

#include "model/device/device_step_arrays.h"

namespace turbomind {

namespace {

constexpr int64_t kLeave = 64 << 20;      // bytes of each device, for what is not foreseen here
constexpr int64_t kShortestPrompt = 2;    // tokens; from there on twice as many
constexpr int64_t kMostBehindPast = 512;  // tokens of a turn after a long past
constexpr int64_t kPast = 8192, kLeastPast = 1024;  // its keys

// Sequences of as many tokens each, the first one after a past of `past` keys.
struct StepKind {
  int64_t rows = 1;
  int64_t tokens = 1;
  int64_t past = 0;
};

// One for each graph of `rows` sequences: a step is padded to a number of pages.
void add_decode(std::vector<StepKind>& kinds, int64_t rows, int64_t keys) {
  int64_t pages = 0;
  do {
    pages = page_bucket(static_cast<int>(pages) + 1);
    kinds.push_back({rows, 1, std::min(pages * kPageTokens, keys) - 1});
  } while (pages * kPageTokens < keys);
}

void add_prompts(std::vector<StepKind>& kinds, const StepLimits& most) {
  const int64_t longest = std::min(most.tokens, most.keys);
  for (int64_t tokens = kShortestPrompt; tokens < 2 * longest; tokens *= 2) {
    const int64_t count = std::min(tokens, longest);
    kinds.push_back({1, count, 0});
    const int64_t past = std::min(kPast, most.keys - count);
    if (count <= kMostBehindPast && past >= kLeastPast) kinds.push_back({1, count, past});
  }
}

// A session alone comes first.
std::vector<StepKind> kinds_of(const StepLimits& most) {
  std::vector<StepKind> kinds;
  add_decode(kinds, 1, most.keys);
  add_prompts(kinds, most);
  for (int64_t rows = 1; rows < most.rows;) {
    rows = std::min<int64_t>(row_bucket(static_cast<int>(rows) + 1), most.rows);
    add_decode(kinds, rows, most.keys);
  }
  return kinds;
}

class Warmer {
 public:
  Warmer(Model& model, const StepLimits& most)
      : model_(model),
        pages_((most.keys + kPageTokens - 1) / kPageTokens),
        rows_(most.rows),
        tokens_(most.rows) {}

  void run(const StepKind& kind) {
    build(kind);
    StepOutputs& outputs = *model_.outputs();
    const bool decode = kind.tokens == 1;
    for (int pass = 0; pass < (decode ? 2 : 1); ++pass) {
      if (pass > 0) {  // tokens of the step before
        batch_.token_from.resize(kind.rows);
        std::iota(batch_.token_from.begin(), batch_.token_from.end(), 0);
      }
      model_.forward(batch_, nullptr, nullptr);
      for (int64_t i = 0; i < kind.rows; ++i) rows_[i] = sample_row(i, decode ? pass + i : i);
      outputs.submit_sample(rows_.data(), kind.rows);
      const LogprobRow reported{};  // of the first sampled token, and of no others
      Logprob logprob;
      outputs.submit_logprobs(&reported, 1);
      outputs.read_tokens(tokens_.data());
      outputs.read_logprobs(&logprob);
    }
  }

 private:
  // Greedy ones and others take different ways.
  static SampleRow sample_row(int64_t row, int64_t way) {
    SampleRow sampling;
    sampling.logits_row = sampling.out = static_cast<int32_t>(row);
    if (way % 2 == 0) {
      sampling.temperature = 0;
    } else {
      sampling.top_k = 40;
      sampling.top_p = 0.9f;
      sampling.min_p = 0.01f;
    }
    return sampling;
  }

  void build(const StepKind& kind) {
    const int64_t all = kind.rows * kind.tokens;
    batch_.token_ids.assign(all, 0);
    batch_.token_from.clear();
    batch_.positions.assign(all, 0);
    batch_.rows.assign(kind.rows, {});
    batch_.sample_rows.clear();
    for (int64_t r = 0; r < kind.rows; ++r) {
      StepRow& row = batch_.rows[r];
      row.q_begin = r * kind.tokens;
      row.q_len = kind.tokens;
      row.kv_begin = r == 0 ? kind.past : 0;
      row.pages.assign(model_.groups().size(), pages_.data());
      for (int64_t t = 0; t < kind.tokens; ++t)
        batch_.positions[row.q_begin + t] = static_cast<int32_t>(row.kv_begin + t);
      batch_.sample_rows.push_back(static_cast<int32_t>(row.q_begin + kind.tokens - 1));
    }
  }

  Model& model_;
  const std::vector<int32_t> pages_;  // all of them are the first one
  std::vector<SampleRow> rows_;
  std::vector<int32_t> tokens_;
  StepBatch batch_;
};

}  // namespace

WarmUp warm_up_device(Model& model, GpuContext& gpu, const StepLimits& most, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const std::vector<StepKind> kinds = kinds_of(most);
  Warmer warmer(model, most);
  WarmUp result;
  result.of = static_cast<int>(kinds.size());
  const auto ranks = static_cast<int64_t>(model.memory().ranks.size());
  for (const StepKind& kind : kinds) {
    if (spent() >= seconds || model.free_bytes() < kLeave * ranks) break;
    warmer.run(kind);
    ++result.done;
  }
  result.seconds = spent();
  if (result.done < result.of)
    gpu.add_note("warmed up for " + std::to_string(result.done) + " of " +
                 std::to_string(result.of) + " kinds of steps");
  return result;
}

}  // namespace turbomind
