// The part of EngineCore that uses the lower tiers.
#include <algorithm>
#include <chrono>
#include <numeric>

#include "core/error.h"
#include "engine/engine_core.h"

namespace turbomind {

namespace {
constexpr int64_t kSampleTokens = 512;  // of the chunk whose prefill speed is reported
constexpr double kAsRecorded = 2;       // a machine slower or faster by more rescales the record
}  // namespace

void EngineCore::save(HandleId handle) {
  Sequence& seq = find(handle).seq;
  if (tiers_ && seq.persist) tiers_->save(seq);
}

void EngineCore::warm(HandleId handle) {
  Handle& h = find(handle);
  if (!tiers_ || h.request) return;
  std::vector<int64_t> promised(kv_.groups(), 0);
  scheduler_.add_promised(promised);
  tiers_->prefetch(h.seq, scheduler_.compute_cost(), promised);
}

void EngineCore::flush(std::shared_ptr<Flush> flush) {
  if (tiers_) {
    tiers_->flush(std::move(flush));
  } else {
    flush->finish(true);
  }
}

void EngineCore::remove_pages(const std::vector<BlockHash>& keys) {
  if (tiers_) tiers_->remove(keys);
  kv_.forget(keys);
}

Sequence EngineCore::sequence_of(const std::vector<int32_t>& token_ids, int adapter,
                                 const std::string& salt) const {
  Sequence seq = kv_.make_sequence(adapter, salt, 0);
  seq.tokens = token_ids;
  return seq;
}

// Returns how many first tokens of `seq` one open handle has KV of, at most.
int64_t EngineCore::longest_held(const Sequence& seq) const {
  int64_t most = 0;
  for (const auto& [id, h] : handles_) {
    if (!(h.seq.root == seq.root)) continue;
    const auto end = h.seq.tokens.begin() + std::min(h.seq.written, seq.length());
    const auto same = std::mismatch(h.seq.tokens.begin(), end, seq.tokens.begin()).first;
    most = std::max<int64_t>(most, same - h.seq.tokens.begin());
  }
  return most;
}

Residence EngineCore::residence(const std::vector<int32_t>& token_ids, int adapter,
                                const std::string& salt) {
  Sequence seq = sequence_of(token_ids, adapter, salt);
  Residence where;
  if (tiers_) where = tiers_->residence(seq);
  if (!tiers_ && kv_.prefix_reuse())
    where.device = kPageTokens * kv_.longest_hit(seq, seq.length() / kPageTokens, false);
  where.device = std::max(where.device, longest_held(seq));
  for (int64_t& tokens : where.tiers) tokens = std::max(tokens, where.device);
  return where;
}

double EngineCore::predict_ttft(const std::vector<int32_t>& token_ids, int64_t added, int adapter,
                                const std::string& salt) {
  Sequence seq = sequence_of(token_ids, adapter, salt);
  const int64_t device = residence(token_ids, adapter, salt).device;
  const ComputeCost compute = scheduler_.compute_cost();
  if (tiers_) return tiers_->predict_ttft(seq, device, added, compute);
  const int64_t length = seq.length() + added;
  return compute.seconds(std::min(device, length - 1), length);
}

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

// Initialises the fit of step times, so that the first decisions between loading and computing have
// numbers: from the record of earlier engines, scaled by how long a step of one page takes now, or
// from two measured steps.
void EngineCore::begin_speeds(const std::optional<SpeedRecord>& recorded) {
  StepPlan one, page;
  one.cost.add(1, 0);
  page.cost.add(std::min<int64_t>(kPageTokens, model_.max_context()), 0);
  const double first =
      measured_step(page.cost.tokens);  // warms up; the minimum of two ignores a busy moment
  const double ms = std::min(first, measured_step(page.cost.tokens));
  if (recorded) {
    StepTime then;
    StepTime::Fit fit = recorded->steps;
    const double ratio = then.begin_with(fit) ? ms / then.predict(page.cost) : 0;
    if (ratio < 1 / kAsRecorded || ratio > kAsRecorded)
      for (double& term : fit.ms) term *= ratio;
    if (scheduler_.begin_with(fit)) return;
  }
  scheduler_.observe(one, measured_step(1));
  scheduler_.observe(page, ms);
}

// Runs a step of `tokens` tokens in the first page of each group and returns its milliseconds.
double EngineCore::measured_step(int64_t tokens) {
  const std::vector<int32_t> first_page(1, 0);
  std::vector<float> logits(model_.vocab());
  StepBatch batch;
  batch.token_ids.assign(tokens, 0);
  batch.positions.resize(tokens);
  std::iota(batch.positions.begin(), batch.positions.end(), 0);
  StepRow& row = batch.rows.emplace_back();
  row.q_len = tokens;
  row.pages.assign(kv_.groups(), first_page.data());
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

LastSaves EngineCore::finish_saves(double seconds) noexcept {
  if (!tiers_) return {};
  for (auto& [id, h] : handles_) try {
      if (h.seq.persist) tiers_->save(h.seq);
    } catch (const std::exception&) {  // out of memory: it is computed again
    }
  try {
    if (unrecorded_steps_ > 0) record_speeds();
  } catch (const std::exception&) {  // out of memory: the next engine measures
  }
  return tiers_->finish(seconds);
}

}  // namespace turbomind
