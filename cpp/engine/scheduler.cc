#include "engine/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace turbomind {

namespace {

constexpr int64_t kLeastChunk = 16;     // tokens: prefill goes on however busy the engine is
constexpr int64_t kLastChunk = 64;      // tokens: with so few left the first in rank is answered
constexpr int64_t kChunkMultiple = 16;  // rows of a matrix tile
// step_ms that steps under way may take when they give nobody a token; calls on handles wait that
// long
constexpr double kAloneFactor = 4;
// Steps planned ahead in a row while somebody waits: windows give back pages as they move on.
constexpr int kMostAhead = 16;

int64_t tail_of_page(const Sequence& seq) {
  return kPageTokens - seq.written % kPageTokens;
}

bool forks(const Run& run) {
  return run.request->generates() && run.request->params->n > 1 && run.request->runs.size() == 1;
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
      rows_(options.max_batch_size, nullptr) {
  candidates_.reserve(rows_.size());
}

void Scheduler::remove(Run* run) {
  news_ = true;
  if (run->row >= 0) {
    rows_[run->row] = nullptr;
    run->row = -1;
  } else {
    waiting_.erase(run);
  }
}

int64_t Scheduler::rows_in_use() const {
  return static_cast<int64_t>(rows_.size()) - std::count(rows_.begin(), rows_.end(), nullptr);
}

void Scheduler::admit() {
  const auto free_row = [this] { return std::find(rows_.begin(), rows_.end(), nullptr); };
  while (Run* run = first_ready()) {
    Run* loser = free_row() == rows_.end() ? outranked_by(*run) : nullptr;
    if (!loser && free_row() == rows_.end()) return;
    kv_.resume(*run->seq, run->request->reusable(*run), run->request->options.exact);
    if (set_aside(*run)) continue;
    // Nobody passes one that waits for pages, or it could wait for ever.
    if (!make_room(*run) && (rows_in_use() > 0 || (tiers_ && tiers_->fetching()))) return;
    if (set_aside(*run)) continue;                      // there is room now
    if (free_row() == rows_.end()) give_up_row(loser);  // else it had to give up its pages too
    seat(run);
  }
}

// Runs that have computed what was missing before pages that are there: these they take over, or
// wait for as if they had no row yet.
void Scheduler::cross_gaps() {
  for (size_t i = 0; i < rows_.size(); ++i) {
    Run* run = rows_[i];
    if (!run || run->gap_end == Run::kUnknown || run->seq->written < run->gap_end) continue;
    waiting_.insert(run);
    rows_[i] = nullptr;
    run->row = -1;
    run->fetch_tried = false;
    run->gap_end = Run::kUnknown;
    run->crossed_from = run->seq->written;
    kv_.resume(*run->seq, run->request->reusable(*run), run->request->options.exact);
    if (set_aside(*run)) continue;
    waiting_.erase(run);
    rows_[i] = run;
    run->row = static_cast<int>(i);
    count_crossed(*run);
  }
}

// As seat() does of what was there at first.
void Scheduler::count_crossed(Run& run) {
  const int64_t from = std::exchange(run.crossed_from, kNoToken);
  RequestState& request = *run.request;
  if (from >= run.seq->written || run.choice != 0 || run.seq->length() != request.prompt_tokens)
    return;
  const int64_t more = std::min(request.reused_tokens + run.seq->written - from, run.seq->written);
  const int64_t reused = std::max(request.reused_tokens, more);
  tokens_reused_ += reused - std::exchange(request.reused_tokens, reused);
  const int64_t loaded = std::min(reused, run.loaded_tokens);
  tokens_loaded_ += loaded - std::exchange(request.loaded_tokens, loaded);
  request.foreign_tokens = std::min(reused, run.seq->foreign());
}

// The first in rank that does not wait for its pages to be fetched.
Run* Scheduler::first_ready() const {
  for (Run* run : waiting_)
    if (!run->fetching) return run;
  return nullptr;
}

// True when its pages are on their way from a lower tier. Others pass it meanwhile, and no running
// one gives anything up for it.
bool Scheduler::set_aside(Run& run) {
  if (!tiers_) return false;
  const auto make_room = [&] { return reclaim_idle(run); };
  const auto promised = [this]() -> const std::vector<int64_t>& {
    promised_.assign(kv_.groups(), 0);
    add_promised(promised_);
    return promised_;
  };
  return tiers_->fetch(run, step_time_, prefill_chunk_, promised, make_room);
}

void Scheduler::seat(Run* run) {
  const auto row = std::find(rows_.begin(), rows_.end(), nullptr);
  waiting_.erase(run);
  run->row = static_cast<int>(row - rows_.begin());
  *row = run;
  run->fetch_tried = false;
  if (std::exchange(run->admitted, true)) return count_crossed(*run);
  if (run->choice != 0) return;  // shares what the first choice computed
  const int64_t written = run->seq->written;
  run->computed_from = std::min(written, run->first_loaded);
  RequestState& request = *run->request;
  request.reused_tokens = written;
  request.loaded_tokens = std::min(written, run->loaded_tokens);
  request.foreign_tokens = run->seq->foreign();
  tokens_reused_ += written;
  tokens_loaded_ += request.loaded_tokens;
}

// The last run in rank, if its priority is worse. Of equal priority, whoever has a row keeps it.
Run* Scheduler::outranked_by(const Run& run) const {
  Run* last = *std::max_element(rows_.begin(), rows_.end(), ByRank{});
  return last->request->options.priority > run.request->options.priority ? last : nullptr;
}

void Scheduler::add_promised(std::vector<int64_t>& promised) const {
  for (const Run* run : rows_)
    if (run) kv_.add_outstanding(*run->seq, promised);
}

bool Scheduler::make_room(const Run& run) {
  for (;;) {
    promised_.assign(kv_.groups(), 0);
    add_promised(promised_);
    if (kv_.can_hold(*run.seq, promised_)) return true;
    if (!reclaim(run)) return false;
  }
}

// One more holder of pages gives them up: an idle handle, a run without a row, a running one that
// ranks behind the beneficiary.
bool Scheduler::reclaim(const Run& beneficiary) {
  if (reclaim_idle(beneficiary)) return true;
  Run* last = nullptr;
  for (Run* run : rows_)
    if (run && ranks_before(beneficiary, *run) && (!last || ranks_before(*last, *run))) last = run;
  if (!last) return false;
  preempt(last);
  return true;
}

// The same of those that are not running.
bool Scheduler::reclaim_idle(const Run& beneficiary) {
  if (park_idle_()) return true;
  if (tiers_ && tiers_->give_up_idle()) return true;
  for (auto it = waiting_.rbegin(); it != waiting_.rend(); ++it) {
    Run& run = **it;
    if (&run == &beneficiary) continue;
    if (run.fetching) {
      if (!ranks_before(beneficiary, run)) continue;
      tiers_->cancel(*run.seq);
      return true;
    }
    if (!kv_.holds_pages(*run.seq)) continue;
    kv_.drop_pages(*run.seq);
    return true;
  }
  return false;
}

void Scheduler::preempt(Run* run) {
  give_up_row(run);
  kv_.drop_pages(*run->seq);
}

// It keeps its pages as long as nobody needs them.
void Scheduler::give_up_row(Run* run) {
  waiting_.insert(run);
  rows_[run->row] = nullptr;
  run->row = -1;
  run->gap_end = Run::kUnknown;
  ++preemptions_;
}

void Scheduler::plan(StepPlan& plan) {
  if (tiers_) cross_gaps();
  admit();
  fill(plan);
  // Whoever may take part found no page: those ranked before it hold them.
  if (plan.rows.empty() && std::exchange(step_for_, StepFor::all) != StepFor::all) fill(plan);
  step_for_ = step_for_ == StepFor::decoding ? StepFor::first_prompt : StepFor::all;
  while (plan.rows.empty() && !candidates_.empty() && tiers_ && tiers_->give_up_any()) fill(plan);
  news_ = tiers_ && tiers_->fetching();
  steps_overlapped_ = 0;
  if (plan.rows.empty() && !candidates_.empty())
    throw_error(ErrorCode::internal, "no page could be found for the first of ", candidates_.size(),
                " running sequences");
}

void Scheduler::fill(StepPlan& plan) {
  candidates_.clear();
  for (Run* run : rows_)
    if (run) candidates_.push_back({run, 0, run->seq->written, run->seq->pending()});
  choose_lengths();
  for (PlannedRow& c : candidates_)  // a run may have been preempted since the lengths were chosen
    c.tokens = c.run->row >= 0 && c.tokens > 0 ? acquire(*c.run, c.tokens) : 0;
  add_rows(plan);
}

void Scheduler::add_rows(StepPlan& plan) const {
  plan.rows.clear();
  plan.cost = {};
  plan.representative = true;
  for (const bool decode : {true, false})
    for (const PlannedRow& c : candidates_) {
      if (c.tokens == 0 || decode != (c.pending == 1)) continue;
      plan.rows.push_back(c);
      plan.cost.add(c.tokens, c.begin);
      if (!c.run->request->generates()) plan.representative = false;
    }
}

bool Scheduler::plan_ahead(const StepPlan& before, StepPlan& plan) {
  if (step_for_ != StepFor::all) return false;
  if (!waiting_.empty() && (news_ || ++steps_overlapped_ > kMostAhead)) return false;
  if (!look_ahead(before)) return false;
  choose_lengths();
  if (!acquire_ahead()) return false;
  add_rows(plan);
  return !plan.rows.empty();
}

// The candidates as they will be when the step has ended. False: one of them wants a plan() then.
bool Scheduler::look_ahead(const StepPlan& before) {
  candidates_.clear();
  places_.assign(rows_.size(), -1);
  for (size_t i = 0; i < before.rows.size(); ++i)
    if (const Run* run = before.rows[i].run) places_[run->row] = static_cast<int>(i);
  for (size_t i = 0; i < rows_.size(); ++i)
    if (rows_[i] && !follow(*rows_[i], before, places_[i])) return false;
  return true;
}

// The run behind what row `place` of the step computes, unless it ends there; -1: it has none.
bool Scheduler::follow(Run& run, const StepPlan& before, int place) {
  if (run.request->request->cancelled()) return false;
  int64_t begin = run.seq->written;
  if (place >= 0) begin += before.rows[place].tokens;
  if (run.gap_end != Run::kUnknown && begin >= run.gap_end) return false;
  if (const int64_t pending = run.seq->length() - begin; pending > 0) {
    candidates_.push_back({&run, 0, begin, pending});
    return true;
  }
  if (forks(run)) return false;
  if (run.request->generates() && begin + 1 < run.request->limit)
    candidates_.push_back({&run, 0, begin, 1, place});
  return true;
}

// Pages for all of them, or none: nobody gives up any for them.
bool Scheduler::acquire_ahead() {
  const auto tokens = [](const PlannedRow& c) { return c.begin + c.tokens - c.run->seq->written; };
  taken_.assign(kv_.groups(), 0);
  for (const PlannedRow& c : candidates_)
    if (c.tokens > 0) kv_.add_taken(*c.run->seq, tokens(c), taken_);
  if (!kv_.has_available(taken_)) return false;
  for (const PlannedRow& c : candidates_)
    if (c.tokens > 0) kv_.prepare_write(*c.run->seq, tokens(c));
  return true;
}

// Of the candidates, which are put in rank order.
void Scheduler::choose_lengths() {
  std::sort(candidates_.begin(), candidates_.end(),
            [](const PlannedRow& a, const PlannedRow& b) { return ranks_before(*a.run, *b.run); });
  cost_ = {};
  logit_rows_ = 0;
  choose_decoding();
  if (decode_rows_ == 0 && step_for_ == StepFor::decoding) step_for_ = StepFor::first_prompt;
  if (step_for_ != StepFor::decoding) choose_prompts();
}

void Scheduler::choose_decoding() {
  decode_rows_ = 0;
  for (PlannedRow& c : candidates_) {
    if (c.pending > 1) continue;
    c.tokens = 1;
    cost_.add(1, c.begin);
    ++decode_rows_;
  }
  answers_ = decode_rows_ > 0;
}

// In rank order, as far as the step's time goes. Prompts of better priority may come without end,
// so the one that has waited longest has its least chunk set aside before.
void Scheduler::choose_prompts() {
  PlannedRow* waited = step_for_ == StepFor::all ? longest_waiting() : nullptr;
  int64_t aside = 0;
  if (waited) {
    aside = std::min({most_of(*waited), kLeastChunk, prefill_chunk_ / 2});
    add_chunk(*waited, aside);
  }
  bool first = true;
  for (PlannedRow& c : candidates_) {
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

PlannedRow* Scheduler::longest_waiting() {
  PlannedRow* longest = nullptr;
  for (PlannedRow& c : candidates_)
    if (c.pending > 1 && (!longest || c.run->request->arrival < longest->run->request->arrival))
      longest = &c;
  return longest;
}

// Counts `tokens` of the row in what the step costs; negative: takes them out.
void Scheduler::add_chunk(PlannedRow& row, int64_t tokens) {
  if (tokens >= 0) {
    cost_.add(tokens, row.begin);
  } else {
    cost_.remove(-tokens, row.begin);
  }
  if (!row.run->request->generates()) logit_rows_ += tokens;
}

int64_t Scheduler::most_of(const PlannedRow& row) const {
  const Run& run = *row.run;
  int64_t most = std::min(row.pending, prefill_chunk_ - (cost_.tokens - decode_rows_));
  if (run.gap_end > row.begin) most = std::min(most, run.gap_end - row.begin);
  return run.request->generates() ? most : std::min(most, kMostLogitRows - logit_rows_);
}

int64_t Scheduler::chunk_of(const PlannedRow& row, int64_t least) const {
  const int64_t most = most_of(row);
  if (most <= 0) return 0;
  const double budget_ms = answers_ ? step_ms_ : alone_ms_;
  int64_t tokens = step_time_.largest_chunk(cost_, row.begin, most, budget_ms);
  if (tokens > kChunkMultiple && tokens < most) tokens -= tokens % kChunkMultiple;
  return std::max(tokens, std::min(most, least));
}

// Takes pages for the run's next tokens: all, else what fits its current page, else none.
int64_t Scheduler::acquire(Run& run, int64_t tokens) {
  Sequence& seq = *run.seq;
  while (!kv_.can_write(seq, tokens)) {
    if (reclaim(run)) continue;
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
