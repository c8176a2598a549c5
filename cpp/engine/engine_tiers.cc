// The part of the engine's core that asks the tiers below the device.
#include <algorithm>
#include <chrono>
#include <numeric>

#include "core/error.h"
#include "engine/engine_core.h"

namespace turbomind {

namespace {
constexpr int64_t kSampleTokens = 512;  // of the prefill speed that is told
constexpr double kAsNoted = 2;          // times slower or faster than noted, at most
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

// The most of its first tokens whose KV an open handle has.
int64_t EngineCore::held_of(const Sequence& seq) const {
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
  where.device = std::max(where.device, held_of(seq));
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

// The first decisions between loading and computing are not to be blind. Where a step of a page
// does not take about what earlier engines have noted, all of that is as many times off.
void EngineCore::begin_speeds(const std::optional<SpeedRecord>& noted) {
  StepPlan one, page;
  one.cost.add(1, 0);
  page.cost.add(std::min<int64_t>(kPageTokens, model_.max_context()), 0);
  const double first = measured_step(page.cost.tokens);  // warms up, but the machine may be busy
  const double ms = std::min(first, measured_step(page.cost.tokens));
  if (noted) {
    StepTime then;
    StepTime::Fit fit = noted->steps;
    const double ratio = then.begin_with(fit) ? ms / then.predict(page.cost) : 0;
    if (ratio < 1 / kAsNoted || ratio > kAsNoted)
      for (double& term : fit.ms) term *= ratio;
    if (scheduler_.begin_with(fit)) return;
  }
  scheduler_.observe(one, measured_step(1));
  scheduler_.observe(page, ms);
}

// Milliseconds of a step in the first page of each group.
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
    } catch (const std::exception&) {  // for lack of memory: it is computed again
    }
  try {
    if (unrecorded_steps_ > 0) record_speeds();
  } catch (const std::exception&) {  // for lack of memory: the next engine measures
  }
  return tiers_->finish(seconds);
}

}  // namespace turbomind
