#include "engine/step/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace turbomind {

namespace {

// Steps in flight after which no sequence gets a token may take step_ms times this; calls on
// handles wait that long.
constexpr double kAloneFactor = 4;
// Most plan_next() in a row while sequences wait: windows release pages as they move on, so a
// waiting sequence may fit after that many.
constexpr int kMostOverlapped = 16;
constexpr double kForgetLength = 0.9;  // per sequence: expected_growth_ has a memory of about 10

bool forks(const SequenceState& sequence) {
  return sequence.request->generates() && sequence.request->params->n > 1 &&
         sequence.request->sequences.size() == 1;
}

}  // namespace

Scheduler::Scheduler(KvCache& kv, const EngineOptions& options, std::function<bool()> park_idle,
                     Tiers* tiers, bool asynchronous)
    : kv_(kv),
      prefill_chunk_(options.prefill_chunk > 0 ? options.prefill_chunk : kDefaultPrefillChunk),
      step_ms_(options.step_ms),
      alone_ms_(kAloneFactor * options.step_ms / (asynchronous ? 2 : 1)),
      lone_ms_(kAloneFactor * options.step_ms),
      park_idle_(std::move(park_idle)),
      tiers_(tiers),
      slots_(options.max_batch_size, nullptr),
      awaited_(options.max_batch_size, kNoToken) {
  candidates_.reserve(slots_.size());
  prompts_.reserve(slots_.size());
}

void Scheduler::add(SequenceState* sequence) {
  const RequestState& request = *sequence->request;
  if (tiers_) {
    FetchClient client;
    client.seq = sequence->kv;
    client.priority = request.options.priority;
    client.arrival = request.arrival;
    client.choice = sequence->choice;
    client.exact = request.options.exact;
    client.crosses_holes = request.generates();
    sequence->fetch = tiers_->add(client);
  }
  try {
    waiting_.insert(sequence);
  } catch (...) {
    remove(sequence);
    throw;
  }
  changed_ = true;
}

void Scheduler::remove(SequenceState* sequence) noexcept {
  changed_ = true;
  observe_length(*sequence);
  if (sequence->slot >= 0) {
    hand_over(*sequence);
    slots_[sequence->slot] = nullptr;
    sequence->slot = -1;
  } else {
    waiting_.erase(sequence);
  }
  if (FetchState* fetch = std::exchange(sequence->fetch, nullptr)) tiers_->remove(fetch);
}

void Scheduler::reprioritize(RequestState& request) {
  std::vector<std::set<SequenceState*, ByRank>::node_type> moved;  // their rank changes
  moved.reserve(request.sequences.size());
  for (const auto& sequence : request.sequences)
    if (auto node = waiting_.extract(sequence.get())) moved.push_back(std::move(node));
  request.options.priority = request.request->priority();
  for (auto& node : moved) waiting_.insert(std::move(node));
  for (const auto& sequence : request.sequences)
    if (sequence->fetch) sequence->fetch->set_priority(request.options.priority);
  changed_ = true;
}

// Learns from a sequence that leaves how many tokens sequences generate.
void Scheduler::observe_length(const SequenceState& sequence) {
  if (!sequence.request->generates()) return;
  const int64_t generated = sequence.kv->length() - sequence.request->prompt_tokens;
  if (generated <= 0) return;
  expected_growth_ += (1 - kForgetLength) * (static_cast<double>(generated) - expected_growth_);
}

int64_t Scheduler::slots_in_use() const {
  return static_cast<int64_t>(slots_.size()) - std::count(slots_.begin(), slots_.end(), nullptr);
}

void Scheduler::plan(StepPlan& plan) {
  if (tiers_) cross_holes();
  admit();
  find_awaited();
  fill(plan);
  // Those that may take part found no page: sequences that rank before them hold all.
  if (plan.sequences.empty() && std::exchange(step_for_, StepFor::all) != StepFor::all) fill(plan);
  if (plan.sequences.empty() && taking_part_ < candidates_.size()) {
    left_out_ = true;
    fill(plan);
  }
  step_for_ = step_for_ == StepFor::decoding ? StepFor::first_prompt : StepFor::all;
  while (plan.sequences.empty() && !candidates_.empty() && tiers_ && tiers_->release_any())
    fill(plan);
  left_out_ = taking_part_ < candidates_.size();
  changed_ = tiers_ && tiers_->fetching();
  steps_overlapped_ = 0;
  if (plan.sequences.empty() && !candidates_.empty())
    throw_error(ErrorCode::internal, "no page could be found for the first of ", candidates_.size(),
                " running sequences");
}

void Scheduler::fill(StepPlan& plan) {
  candidates_.clear();
  for (SequenceState* sequence : slots_)
    if (sequence)
      candidates_.push_back({sequence, 0, sequence->kv->written, sequence->kv->pending()});
  choose_lengths();
  for (PlannedSequence& c : candidates_)  // preempted since the lengths were chosen?
    c.tokens = c.sequence->slot >= 0 && c.tokens > 0 ? acquire(*c.sequence, c.tokens) : 0;
  add_sequences(plan);
}

void Scheduler::add_sequences(StepPlan& plan) const {
  plan.sequences.clear();
  plan.cost = {};
  plan.representative = true;
  for (const bool decode : {true, false})
    for (const PlannedSequence& c : candidates_) {
      if (c.tokens == 0 || decode != (c.pending == 1)) continue;
      plan.sequences.push_back(c);
      plan.cost.add(c.tokens, c.begin);
      if (!c.sequence->request->generates()) plan.representative = false;
    }
}

bool Scheduler::plan_next(const StepPlan& before, StepPlan& plan) {
  if (step_for_ != StepFor::all) return false;
  if (!waiting_.empty() && (changed_ || ++steps_overlapped_ > kMostOverlapped)) return false;
  if (completes_awaited(before)) return false;
  if (!find_next_candidates(before)) return false;
  choose_lengths();
  if (!acquire_next()) return false;
  left_out_ = taking_part_ < candidates_.size();
  add_sequences(plan);
  return !plan.sequences.empty();
}

// Finds the candidates as they will be when `before` has ended. Returns false when one of them
// needs a plan() then.
bool Scheduler::find_next_candidates(const StepPlan& before) {
  candidates_.clear();
  places_.assign(slots_.size(), -1);
  for (size_t i = 0; i < before.sequences.size(); ++i)
    if (const SequenceState* sequence = before.sequences[i].sequence)
      places_[sequence->slot] = static_cast<int>(i);
  for (size_t i = 0; i < slots_.size(); ++i)
    if (slots_[i] && !follow(*slots_[i], before, places_[i])) return false;
  return true;
}

// Adds the candidate that follows entry `place` of `before` (-1: it has none), unless the sequence
// ends there.
bool Scheduler::follow(SequenceState& sequence, const StepPlan& before, int place) {
  const Request& request = *sequence.request->request;
  if (request.cancelled()) return false;
  if (request.any_choice_cancelled() && request.choice_cancelled(sequence.choice)) return false;
  int64_t begin = sequence.kv->written;
  if (place >= 0) begin += before.sequences[place].tokens;
  if (begin >= sequence.hole_end()) return false;
  if (const int64_t pending = sequence.kv->length() - begin; pending > 0) {
    candidates_.push_back({&sequence, 0, begin, pending});
    return true;
  }
  if (forks(sequence)) return false;
  if (sequence.request->generates() && begin + 1 < sequence.request->limit)
    candidates_.push_back({&sequence, 0, begin, 1, place});
  return true;
}

// Takes pages for all candidates, or for none; it reclaims nothing.
bool Scheduler::acquire_next() {
  const auto tokens = [](const PlannedSequence& c) {
    return c.begin + c.tokens - c.sequence->kv->written;
  };
  taken_.assign(kv_.groups(), 0);
  for (const PlannedSequence& c : candidates_)
    if (c.tokens > 0) kv_.add_taken(*c.sequence->kv, tokens(c), taken_);
  if (!kv_.has_available(taken_)) return false;
  for (const PlannedSequence& c : candidates_)
    if (c.tokens > 0) kv_.prepare_write(*c.sequence->kv, tokens(c));
  return true;
}

// Takes pages for the sequence's next tokens: for all of them, else for as many as possible.
// Returns their number.
int64_t Scheduler::acquire(SequenceState& sequence, int64_t tokens) {
  Sequence& seq = *sequence.kv;
  while (!kv_.can_write(seq, tokens) && reclaim(sequence)) {
  }
  tokens = kv_.writable_tokens(seq, tokens);
  if (tokens > 0) kv_.prepare_write(seq, tokens);
  return tokens;
}

void Scheduler::observe(const StepPlan& plan, double ms) {
  if (plan.representative) step_time_.observe(plan.cost, ms);
}

}  // namespace turbomind
