// The part of Scheduler that chooses how many tokens each sequence computes in a step.
#include <algorithm>
#include <tuple>

#include "engine/step/scheduler.h"

namespace turbomind {

namespace {

constexpr int64_t kLeastChunk = 16;     // tokens: prefill progresses however busy the engine is
constexpr int64_t kLastChunk = 64;      // tokens: a first prompt with no more left is completed
constexpr int64_t kChunkMultiple = 16;  // rows of a matrix tile
// A step after which no sequence gets a token may exceed its time by this share to complete a
// prompt, which saves another pass over the weights.
constexpr double kCompletion = 0.125;
// A step without the sequences of worse priority than a short prompt must take at most this share
// of one with them; on a GPU, where a few rows more cost nothing, it does not.
constexpr double kAhead = 0.75;

int priority_of(const PlannedSequence& planned) {
  return planned.sequence->request->options.priority;
}

}  // namespace

// Puts the candidates in rank order and chooses how many tokens each of them computes.
void Scheduler::choose_lengths() {
  std::sort(candidates_.begin(), candidates_.end(),
            [](const PlannedSequence& a, const PlannedSequence& b) {
              return ranks_before(*a.sequence, *b.sequence);
            });
  taking_part_ = first_taking_part();
  cost_ = {};
  logit_rows_ = 0;
  choose_decoding();
  if (decoding_ == 0 && step_for_ == StepFor::decoding) step_for_ = StepFor::first_prompt;
  if (step_for_ != StepFor::decoding) choose_prompts();
}

// Returns how many candidates, in rank order, may take part in the step. A short prompt, such as a
// live turn's, is computed without the decoding of worse priority, so that its first token comes
// sooner. That decoding takes part in every second step at least.
size_t Scheduler::first_taking_part() const {
  const size_t all = candidates_.size();
  if (left_out_ || step_for_ != StepFor::all) return all;
  size_t prompt = 0;
  while (prompt < all && candidates_[prompt].pending <= 1) ++prompt;
  if (prompt == all || candidates_[prompt].pending > kLastChunk) return all;
  size_t end = prompt + 1;
  while (end < all && priority_of(candidates_[end]) == priority_of(candidates_[prompt])) ++end;
  for (size_t i = end; i < all; ++i)
    if (candidates_[i].pending > 1) return all;  // a prompt fills the step up
  return predicted_ms(end) < kAhead * predicted_ms(all) ? end : all;
}

// Predicts the time of a step with the first `count` candidates; long prompts fill it up.
double Scheduler::predicted_ms(size_t count) const {
  StepCost cost;
  bool is_full = false;
  for (size_t i = 0; i < count; ++i) {
    const PlannedSequence& c = candidates_[i];
    if (c.pending <= kLastChunk) {
      cost.add(c.pending, c.begin);
    } else {
      is_full = true;
    }
  }
  const double ms = step_time_.predict(cost);
  return is_full ? std::max(ms, step_ms_) : ms;
}

void Scheduler::choose_decoding() {
  decoding_ = 0;
  for (size_t i = 0; i < taking_part_; ++i) {
    PlannedSequence& c = candidates_[i];
    if (c.pending > 1) continue;
    c.tokens = 1;
    cost_.add(1, c.begin);
    ++decoding_;
  }
  answers_ = decoding_ > 0;
}

// Prompts of better priority come first. Among equals the oldest one has half of the step's time
// reserved, so that it takes at most twice as long as alone. The rest of the time goes to prompts
// in order of remaining tokens (shortest remaining first), so that a short prompt does not wait for
// a long one. Prompts of better priority may arrive without end: the prompt that has waited longest
// has its least chunk reserved.
void Scheduler::choose_prompts() {
  prompts_.clear();
  for (size_t i = 0; i < taking_part_; ++i) {
    PlannedSequence& c = candidates_[i];
    if (c.pending > 1) prompts_.push_back({&c, goal_of(c), 0});
  }
  if (prompts_.empty()) return;
  if (step_for_ == StepFor::first_prompt) prompts_.erase(prompts_.begin() + 1, prompts_.end());
  reserve(longest_waiting(), kLeastChunk, prefill_chunk_ / 2);
  for (size_t begin = 0, end = 0; begin < prompts_.size(); begin = end) {
    const int priority = priority_of(*prompts_[begin].planned);
    while (end < prompts_.size() && priority_of(*prompts_[end].planned) == priority) ++end;
    choose_equals(begin, end);
  }
}

// Chooses the chunks of prompts [begin, end), which are in rank order and of equal priority.
void Scheduler::choose_equals(size_t begin, size_t end) {
  const auto first = prompts_.begin() + begin, last = prompts_.begin() + end;
  if (end - begin > 1) {
    const auto shorter = [](const Prompt& a, const Prompt& b) { return a.goal < b.goal; };
    const Prompt oldest = *first;
    const int64_t shortest = std::min_element(first, last, shorter)->goal;
    reserve(*first, half_step(*oldest.planned, shortest), std::max<int64_t>(prefill_chunk_ / 2, 1));
    std::stable_sort(first, last, shorter);
  }
  for (auto prompt = first; prompt != last; ++prompt) {
    PlannedSequence& c = *prompt->planned;
    add_chunk(c, -prompt->reserved);
    int64_t least = prompt->reserved;
    if (prompt == prompts_.begin())
      least = std::max(least, c.pending <= kLastChunk ? kLastChunk : kLeastChunk);
    c.tokens = chunk_of(c, least);
    add_chunk(c, c.tokens);
    answers_ = answers_ || c.tokens == c.pending;
  }
}

// Returns the tokens of the prompt that half of the step's time suffices for, at least the least
// chunk. The time is that of a step with an answer if `shortest` tokens of another prompt fit.
int64_t Scheduler::half_step(const PlannedSequence& planned, int64_t shortest) const {
  const auto half = [&](double ms) {
    return step_time_.largest_chunk(cost_, planned.begin, prefill_chunk_, ms) / 2;
  };
  int64_t tokens = half(step_ms_);
  if (!answers_ && shortest > std::max(tokens, kLastChunk)) tokens = half(alone_ms_);
  return std::max(tokens - tokens % kChunkMultiple, kLeastChunk);
}

// Returns the tokens that the prompt computes before it is complete, or before another sequence can
// share what it has computed.
int64_t Scheduler::goal_of(const PlannedSequence& planned) const {
  const int64_t awaited = awaited_[planned.sequence->slot];
  if (awaited == kNoToken || awaited <= planned.begin) return planned.pending;
  return std::min(planned.pending, awaited - planned.begin);
}

// Adds `tokens` of the prompt, at most `most`, to the cost of the step in advance, unless more were
// reserved before.
void Scheduler::reserve(Prompt& prompt, int64_t tokens, int64_t most) {
  add_chunk(*prompt.planned, -prompt.reserved);
  tokens = std::max(prompt.reserved, std::min(tokens, most));
  prompt.reserved = std::max<int64_t>(std::min(tokens, most_of(*prompt.planned)), 0);
  add_chunk(*prompt.planned, prompt.reserved);
}

Scheduler::Prompt& Scheduler::longest_waiting() {
  const auto arrival = [](const Prompt& p) { return p.planned->sequence->request->arrival; };
  return *std::min_element(prompts_.begin(), prompts_.end(), [&](const Prompt& a, const Prompt& b) {
    return arrival(a) < arrival(b);
  });
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
  int64_t tokens = step_time_.largest_chunk(cost_, planned.begin, most, budget_ms());
  const double completes = most == planned.pending && !answers_ ? 1 + kCompletion : 1;
  if (static_cast<double>(tokens) * completes >= static_cast<double>(most)) return most;
  if (tokens > kChunkMultiple && tokens < most) tokens -= tokens % kChunkMultiple;
  return std::max(tokens, std::min(most, least));
}

// A prompt alone may take the time of two steps in flight, since no other sequence waits for it.
double Scheduler::budget_ms() const {
  if (answers_) return step_ms_;
  return candidates_.size() == 1 && waiting_.empty() ? lone_ms_ : alone_ms_;
}

}  // namespace turbomind
