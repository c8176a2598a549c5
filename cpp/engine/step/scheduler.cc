#include "engine/step/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace turbomind {

namespace {

constexpr int64_t kLeastChunk = 16;     // tokens: prefill progresses however busy the engine is
constexpr int64_t kLastChunk = 64;      // tokens: a first prompt with no more left is completed
constexpr int64_t kChunkMultiple = 16;  // rows of a matrix tile
// Steps in flight after which no sequence gets a token may take step_ms times this; calls on
// handles wait that long.
constexpr double kAloneFactor = 4;
// Most plan_next() in a row while sequences wait: windows release pages as they move on, so a
// waiting sequence may fit after that many.
constexpr int kMostOverlapped = 16;

int64_t tail_of_page(const Sequence& seq) {
  return kPageTokens - seq.written % kPageTokens;
}

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
      park_idle_(std::move(park_idle)),
      tiers_(tiers),
      slots_(options.max_batch_size, nullptr) {
  candidates_.reserve(slots_.size());
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
  if (sequence->slot >= 0) {
    slots_[sequence->slot] = nullptr;
    sequence->slot = -1;
  } else {
    waiting_.erase(sequence);
  }
  if (FetchState* fetch = std::exchange(sequence->fetch, nullptr)) tiers_->remove(fetch);
}

int64_t Scheduler::slots_in_use() const {
  return static_cast<int64_t>(slots_.size()) - std::count(slots_.begin(), slots_.end(), nullptr);
}

void Scheduler::admit() {
  const auto free_slot = [this] { return std::find(slots_.begin(), slots_.end(), nullptr); };
  while (SequenceState* sequence = first_ready()) {
    SequenceState* loser = free_slot() == slots_.end() ? outranked_by(*sequence) : nullptr;
    if (!loser && free_slot() == slots_.end()) return;
    kv_.resume(*sequence->kv, sequence->request->reusable(*sequence),
               sequence->request->options.exact);
    if (set_aside(*sequence)) continue;
    // No sequence passes one that waits for pages, which could otherwise wait for ever.
    if (!make_room(*sequence) && (slots_in_use() > 0 || (tiers_ && tiers_->fetching()))) return;
    if (set_aside(*sequence)) continue;                    // there is room for a fetch now
    if (free_slot() == slots_.end()) release_slot(loser);  // unless make_room() preempted it
    take_slot(sequence);
  }
}

// Handles sequences that have computed a hole up to pages that lower tiers have: each of them takes
// these pages over, or waits for them without a slot.
void Scheduler::cross_holes() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    SequenceState* sequence = slots_[i];
    if (!sequence || sequence->kv->written < sequence->hole_end()) continue;
    waiting_.insert(sequence);
    slots_[i] = nullptr;
    sequence->slot = -1;
    sequence->fetch->reach_hole_end(sequence->kv->written);
    kv_.resume(*sequence->kv, sequence->request->reusable(*sequence),
               sequence->request->options.exact);
    if (set_aside(*sequence)) continue;
    waiting_.erase(sequence);
    slots_[i] = sequence;
    sequence->slot = static_cast<int>(i);
    count_crossed(*sequence);
  }
}

// Counts what was reused after a hole, as take_slot() counts what was reused at first.
void Scheduler::count_crossed(SequenceState& sequence) {
  if (!sequence.fetch) return;
  const int64_t from = sequence.fetch->take_crossing();
  const Sequence& kv = *sequence.kv;
  RequestState& request = *sequence.request;
  if (from >= kv.written || sequence.choice != 0 || kv.length() != request.prompt_tokens) return;
  const int64_t more = std::min(request.reused_tokens + kv.written - from, kv.written);
  const int64_t reused = std::max(request.reused_tokens, more);
  tokens_reused_ += reused - std::exchange(request.reused_tokens, reused);
  const int64_t loaded = std::min(reused, sequence.fetch->loaded_tokens());
  tokens_loaded_ += loaded - std::exchange(request.loaded_tokens, loaded);
  request.foreign_tokens = std::min(reused, kv.foreign());
}

// Returns the first waiting sequence in rank for which no pages are being loaded, or null.
SequenceState* Scheduler::first_ready() const {
  for (SequenceState* sequence : waiting_)
    if (!sequence->fetching()) return sequence;
  return nullptr;
}

// Returns true when pages of the sequence are being loaded from a lower tier. Other sequences pass
// it meanwhile, and running ones release nothing for it.
bool Scheduler::set_aside(SequenceState& sequence) {
  if (!sequence.fetch) return false;
  for (;;) {
    promised_.assign(kv_.groups(), 0);
    add_promised(promised_);
    const FetchResult result = tiers_->fetch(*sequence.fetch, sequence.request->reusable(sequence),
                                             compute_cost(), promised_);
    if (result == FetchResult::no_room && reclaim_idle(sequence)) continue;
    return result == FetchResult::waiting;
  }
}

void Scheduler::take_slot(SequenceState* sequence) {
  const auto slot = std::find(slots_.begin(), slots_.end(), nullptr);
  waiting_.erase(sequence);
  sequence->slot = static_cast<int>(slot - slots_.begin());
  *slot = sequence;
  const FetchState* fetch = sequence->fetch;
  if (fetch) sequence->fetch->begin_slot();
  if (std::exchange(sequence->admitted, true)) return count_crossed(*sequence);
  if (sequence->choice != 0) return;  // it shares what the first choice computed
  const int64_t written = sequence->kv->written;
  sequence->computed_from = fetch ? std::min(written, fetch->first_loaded()) : written;
  RequestState& request = *sequence->request;
  request.reused_tokens = written;
  request.loaded_tokens = fetch ? std::min(written, fetch->loaded_tokens()) : 0;
  request.foreign_tokens = sequence->kv->foreign();
  tokens_reused_ += written;
  tokens_loaded_ += request.loaded_tokens;
}

// Returns the last sequence in rank with a slot if its priority is worse, else null.
SequenceState* Scheduler::outranked_by(const SequenceState& sequence) const {
  SequenceState* last = *std::max_element(slots_.begin(), slots_.end(), ByRank{});
  return last->request->options.priority > sequence.request->options.priority ? last : nullptr;
}

void Scheduler::add_promised(std::vector<int64_t>& promised) const {
  for (const SequenceState* sequence : slots_)
    if (sequence) kv_.add_outstanding(*sequence->kv, promised);
}

bool Scheduler::make_room(const SequenceState& sequence) {
  for (;;) {
    promised_.assign(kv_.groups(), 0);
    add_promised(promised_);
    if (kv_.can_hold(*sequence.kv, promised_)) return true;
    if (!reclaim(sequence)) return false;
  }
}

// Releases the pages of one more holder: an idle handle, a sequence without a slot, or one with a
// slot that ranks after the beneficiary.
bool Scheduler::reclaim(const SequenceState& beneficiary) {
  if (reclaim_idle(beneficiary)) return true;
  SequenceState* last = nullptr;
  for (SequenceState* sequence : slots_)
    if (sequence && ranks_before(beneficiary, *sequence) &&
        (!last || ranks_before(*last, *sequence)))
      last = sequence;
  if (!last) return false;
  preempt(last);
  return true;
}

// The same, of holders without a slot.
bool Scheduler::reclaim_idle(const SequenceState& beneficiary) {
  if (park_idle_()) return true;
  if (tiers_ && tiers_->release_idle()) return true;
  for (auto it = waiting_.rbegin(); it != waiting_.rend(); ++it) {
    SequenceState& sequence = **it;
    if (&sequence == &beneficiary) continue;
    if (sequence.fetching()) {
      if (!ranks_before(beneficiary, sequence)) continue;
      tiers_->cancel(*sequence.kv);
      return true;
    }
    if (!kv_.holds_pages(*sequence.kv)) continue;
    kv_.drop_pages(*sequence.kv);
    return true;
  }
  return false;
}

void Scheduler::preempt(SequenceState* sequence) {
  release_slot(sequence);
  kv_.drop_pages(*sequence->kv);
}

// The sequence holds its pages until another one needs them.
void Scheduler::release_slot(SequenceState* sequence) {
  waiting_.insert(sequence);
  slots_[sequence->slot] = nullptr;
  sequence->slot = -1;
  if (sequence->fetch) sequence->fetch->end_slot();
  ++preemptions_;
}

void Scheduler::plan(StepPlan& plan) {
  if (tiers_) cross_holes();
  admit();
  fill(plan);
  // Those that may take part found no page: sequences that rank before them hold all.
  if (plan.sequences.empty() && std::exchange(step_for_, StepFor::all) != StepFor::all) fill(plan);
  step_for_ = step_for_ == StepFor::decoding ? StepFor::first_prompt : StepFor::all;
  while (plan.sequences.empty() && !candidates_.empty() && tiers_ && tiers_->release_any())
    fill(plan);
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
  if (!find_next_candidates(before)) return false;
  choose_lengths();
  if (!acquire_next()) return false;
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
  if (sequence.request->request->cancelled()) return false;
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

// Puts the candidates in rank order and chooses how many tokens each of them computes.
void Scheduler::choose_lengths() {
  std::sort(candidates_.begin(), candidates_.end(),
            [](const PlannedSequence& a, const PlannedSequence& b) {
              return ranks_before(*a.sequence, *b.sequence);
            });
  cost_ = {};
  logit_rows_ = 0;
  choose_decoding();
  if (decoding_ == 0 && step_for_ == StepFor::decoding) step_for_ = StepFor::first_prompt;
  if (step_for_ != StepFor::decoding) choose_prompts();
}

void Scheduler::choose_decoding() {
  decoding_ = 0;
  for (PlannedSequence& c : candidates_) {
    if (c.pending > 1) continue;
    c.tokens = 1;
    cost_.add(1, c.begin);
    ++decoding_;
  }
  answers_ = decoding_ > 0;
}

// Chooses in rank order, as far as the step's time goes. Prompts of better priority may arrive
// without end, so the prompt that has waited longest has its least chunk reserved first.
void Scheduler::choose_prompts() {
  PlannedSequence* waited = step_for_ == StepFor::all ? longest_waiting() : nullptr;
  int64_t aside = 0;
  if (waited) {
    aside = std::min({most_of(*waited), kLeastChunk, prefill_chunk_ / 2});
    add_chunk(*waited, aside);
  }
  bool first = true;
  for (PlannedSequence& c : candidates_) {
    if (c.pending <= 1) continue;
    if (&c == waited) add_chunk(c, -aside);
    int64_t least = &c == waited ? aside : 0;
    if (first) least = c.pending <= kLastChunk ? kLastChunk : kLeastChunk;
    c.tokens = chunk_of(c, least);
    add_chunk(c, c.tokens);
    answers_ = answers_ || c.tokens == c.pending;
    if (step_for_ == StepFor::first_prompt) break;
    first = false;
  }
}

PlannedSequence* Scheduler::longest_waiting() {
  PlannedSequence* longest = nullptr;
  for (PlannedSequence& c : candidates_)
    if (c.pending > 1 &&
        (!longest || c.sequence->request->arrival < longest->sequence->request->arrival))
      longest = &c;
  return longest;
}

// Adds `tokens` of the sequence to the cost of the step; negative: removes them.
void Scheduler::add_chunk(PlannedSequence& planned, int64_t tokens) {
  if (tokens >= 0) {
    cost_.add(tokens, planned.begin);
  } else {
    cost_.remove(-tokens, planned.begin);
  }
  if (!planned.sequence->request->generates()) logit_rows_ += tokens;
}

int64_t Scheduler::most_of(const PlannedSequence& planned) const {
  const SequenceState& sequence = *planned.sequence;
  int64_t most = std::min(planned.pending, prefill_chunk_ - (cost_.tokens - decoding_));
  if (const int64_t end = sequence.hole_end(); end > planned.begin)
    most = std::min(most, end - planned.begin);
  return sequence.request->generates() ? most : std::min(most, kMostLogitRows - logit_rows_);
}

int64_t Scheduler::chunk_of(const PlannedSequence& planned, int64_t least) const {
  const int64_t most = most_of(planned);
  if (most <= 0) return 0;
  const double budget_ms = answers_ ? step_ms_ : alone_ms_;
  int64_t tokens = step_time_.largest_chunk(cost_, planned.begin, most, budget_ms);
  if (tokens > kChunkMultiple && tokens < most) tokens -= tokens % kChunkMultiple;
  return std::max(tokens, std::min(most, least));
}

// Takes pages for the sequence's next tokens: for all of them, else for those that fit its current
// page, else none. Returns the number of tokens.
int64_t Scheduler::acquire(SequenceState& sequence, int64_t tokens) {
  Sequence& seq = *sequence.kv;
  while (!kv_.can_write(seq, tokens)) {
    if (reclaim(sequence)) continue;
    if (tokens <= tail_of_page(seq)) return 0;
    tokens = tail_of_page(seq);
  }
  kv_.prepare_write(seq, tokens);
  return tokens;
}

void Scheduler::observe(const StepPlan& plan, double ms) {
  if (plan.representative) step_time_.observe(plan.cost, ms);
}

}  // namespace turbomind
