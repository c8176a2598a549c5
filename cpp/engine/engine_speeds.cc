// The part of EngineCore that measures how long steps take.
#include <algorithm>
#include <chrono>
#include <numeric>

#include "engine/engine_core.h"

namespace turbomind {

namespace {
constexpr int64_t kSampleTokens = 512;  // of the chunk whose prefill speed is reported
constexpr double kAsRecorded = 2;       // a machine slower or faster by more rescales the record
constexpr double kRepeated = 300;       // ms; a longer step is measured once
constexpr double kMeasured = 150;       // ms; a whole chunk that takes longer is not measured
}  // namespace

Speeds EngineCore::speeds() const {
  Speeds speeds;
  StepCost cost;
  cost.add(kSampleTokens, 0);
  const double ms = scheduler_.step_time().predict(cost);
  if (ms > 0) speeds.prefill = 1000 * kSampleTokens / ms;
  for (size_t g = 0; g < kv_.groups(); ++g)
    speeds.bytes_per_token +=
        static_cast<int64_t>(model_.pages().stored_page_bytes(static_cast<int>(g), 1));
  const auto page_bytes = static_cast<int64_t>(model_.pages().stored_page_bytes(0, kPageTokens));
  if (tiers_)
    for (size_t i = 0; i < tiers_->count(); ++i)
      speeds.reads.push_back(tiers_->cost().bytes_per_second(i, page_bytes));
  return speeds;
}

// Initialises the fit of step times, so that the first prompt is cut as later ones are and the
// first decisions between loading and computing have numbers: from the record of earlier engines,
// scaled by how long a step of one page takes now, or from measured steps.
void EngineCore::begin_speeds(const std::optional<SpeedRecord>& recorded) {
  int64_t chunk = std::min(scheduler_.prefill_chunk(), max_context_);
  for (size_t g = 0; g < kv_.groups(); ++g)
    chunk = std::min(chunk, kv_.pool(static_cast<int>(g)).total() * kPageTokens);
  const int64_t page = std::min<int64_t>(kPageTokens, chunk);
  double ms = measured_step(page);
  // The first step warms up, and the minimum of two ignores a busy moment.
  if (ms < kRepeated) ms = std::min(ms, measured_step(page));
  if (!recorded || !begin_as_recorded(recorded->steps, page, ms)) {
    observe_step(1, measured_step(1));
    observe_step(page, ms);
    StepCost whole;
    whole.add(chunk, 0);
    if (chunk > page && scheduler_.step_time().predict(whole) < kMeasured)
      observe_step(chunk, measured_step(chunk));
  }
  scheduler_.trust(chunk);
}

// Returns false when the record is not valid.
bool EngineCore::begin_as_recorded(StepTime::Fit fit, int64_t tokens, double ms) {
  StepCost cost;
  cost.add(tokens, 0);
  StepTime then;
  const double ratio = then.begin_with(fit) ? ms / then.predict(cost) : 0;
  if (ratio < 1 / kAsRecorded || ratio > kAsRecorded)
    for (double& term : fit.ms) term *= ratio;
  return scheduler_.begin_with(fit);
}

void EngineCore::observe_step(int64_t tokens, double ms) {
  StepPlan plan;
  plan.cost.add(tokens, 0);
  scheduler_.observe(plan, ms);
}

// Runs a step of `tokens` tokens in the first pages of each group and returns its milliseconds.
double EngineCore::measured_step(int64_t tokens) {
  std::vector<int32_t> pages((tokens + kPageTokens - 1) / kPageTokens);
  std::iota(pages.begin(), pages.end(), 0);
  std::vector<float> logits(model_.vocab());
  StepBatch batch;
  batch.token_ids.assign(tokens, 0);
  batch.positions.resize(tokens);
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  StepRow& row = batch.rows.emplace_back();
  row.q_len = tokens;
  row.pages.assign(kv_.groups(), pages.data());
  batch.sample_rows = {static_cast<int32_t>(tokens - 1)};
  const auto start = std::chrono::steady_clock::now();
  model_.forward(batch, logits.data(), nullptr);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

void EngineCore::record_speeds() {
  unrecorded_steps_ = 0;
  tiers_->record_speeds(speed_records_, scheduler_.step_time());
}

}  // namespace turbomind
