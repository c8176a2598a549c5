#include "engine/step/step_runner.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/error.h"
#include "cuda/gpu_context.h"
#include "engine/step/step_delay.h"

namespace turbomind {

namespace {

// Returns whether every token of the sequence has KV when the step has ended.
bool completes(const PlannedSequence& planned) {
  return planned.begin + planned.tokens >= planned.sequence->kv->length();
}

// Returns how many rows of logits a sequence needs: all of a logits request, all but the last of a
// score request (a row predicts the next token), the last one of a sequence that is complete.
int64_t sampled_rows(const PlannedSequence& planned) {
  switch (planned.sequence->request->options.kind) {
    case RequestKind::logits:
      return planned.tokens;
    case RequestKind::score:
      return planned.tokens - completes(planned);
    case RequestKind::generate:
      break;
  }
  return completes(planned);
}

}  // namespace

StepRunner::StepRunner(Model& model, KvCache& kv, Scheduler& scheduler, RequestTable& table,
                       const std::atomic<bool>& stop)
    : model_(model),
      asynchronous_(model.outputs() != nullptr),
      overlaps_(asynchronous_ && (!model.context().gpu || model.context().gpu->switches().overlap)),
      kv_(kv),
      scheduler_(scheduler),
      table_(table),
      stop_(stop),
      sampler_(model.context(), model.vocab()),
      vocab_(model.vocab()) {}

const StepPlan* StepRunner::to_follow() const {
  const SubmittedStep& step = in_turn_[oldest_];
  const bool may = overlaps_ && in_flight_ == 1 && !step.failure && !step.abandoned;
  return may && !step.needs_host ? &step.plan : nullptr;
}

void StepRunner::leave(const SequenceState& sequence) {
  if (in_flight_ > 0) oldest().forget(sequence);
  if (in_flight_ > 1) youngest().forget(sequence);
}

void StepRunner::abandon() {
  if (asynchronous_) model_.outputs()->abandon_steps();
  in_flight_ = 0;
}

void StepRunner::submit(StepPlan& plan) {
  const SubmittedStep* before = in_flight_ > 0 ? &oldest() : nullptr;
  SubmittedStep& step = before ? youngest() : oldest();
  step.begin(before != nullptr);
  std::swap(step.plan, plan);
  ++in_flight_;
  delay_step();
  try {
    build(step, before);
    step.abandoned =
        !model_.forward(step.batch, asynchronous_ ? nullptr : logits_.data(), &cancel_);
    if (step.abandoned) return;
    build_jobs(step);
    if (asynchronous_) submit_jobs(step, 0, step.jobs.size());
  } catch (const std::exception&) {
    step.failure = std::current_exception();
  }
}

void StepRunner::build(SubmittedStep& step, const SubmittedStep* before) {
  StepBatch& batch = step.batch;
  batch.token_ids.clear();
  batch.token_from.clear();
  batch.positions.clear();
  batch.sample_rows.clear();
  batch.rows.resize(step.plan.sequences.size());
  step.logit_rows.clear();
  cancel_.flags.assign(1, &stop_);
  bool follows = false;
  for (size_t i = 0; i < step.plan.sequences.size(); ++i) {
    add_sequence(step, i, before);
    follows = follows || step.plan.sequences[i].after >= 0;
  }
  if (!follows) batch.token_from.clear();
  if (!asynchronous_) grow_logits(batch.sample_rows.size());
}

void StepRunner::add_sequence(SubmittedStep& step, size_t i, const SubmittedStep* before) {
  StepBatch& batch = step.batch;
  const PlannedSequence& planned = step.plan.sequences[i];
  const Sequence& seq = *planned.sequence->kv;
  const int64_t q_begin = static_cast<int64_t>(batch.token_ids.size());
  StepRow& row = batch.rows[i];
  row.q_begin = q_begin;
  row.q_len = planned.tokens;
  row.kv_begin = planned.begin;
  row.adapter = seq.adapter;
  row.pages.clear();
  for (const auto& table : seq.pages) row.pages.push_back(table.data());
  for (int64_t t = planned.begin; t < planned.begin + planned.tokens; ++t) {
    batch.token_ids.push_back(planned.after < 0 ? seq.tokens[t] : 0);
    if (before)
      batch.token_from.push_back(planned.after < 0 ? -1 : before->device_index[planned.after]);
    batch.positions.push_back(static_cast<int32_t>(t));
  }
  const int64_t wanted = sampled_rows(planned);
  step.logit_rows.push_back(wanted);
  // A generating sequence needs its last row, others their first ones.
  const int64_t from =
      planned.sequence->request->generates() ? q_begin + planned.tokens - 1 : q_begin;
  for (int64_t r = 0; r < wanted; ++r) batch.sample_rows.push_back(static_cast<int32_t>(from + r));
  if (!before && seq.pending() > 1)
    cancel_.flags.push_back(planned.sequence->request->request->cancel_flag());
}

void StepRunner::grow_logits(size_t rows) {
  if (logits_.size() < rows * vocab_) logits_.resize(rows * vocab_);
}

void StepRunner::build_jobs(SubmittedStep& step) {
  step.device_index.clear();
  step.needs_host = false;
  int32_t on_device = 0;
  int64_t row = 0;
  for (size_t i = 0; i < step.plan.sequences.size(); ++i) {
    const PlannedSequence& planned = step.plan.sequences[i];
    SequenceState& sequence = *planned.sequence;
    const bool samples = sequence.request->generates() && completes(planned);
    if (samples) add_job(step, sequence, row, planned.begin + planned.tokens);
    const bool device = samples && asynchronous_ && sequence.sampler->device_samples();
    step.device_index.push_back(device ? on_device++ : -1);
    step.needs_host = step.needs_host || (step.logit_rows[i] > 0 && !device);
    row += step.logit_rows[i];
  }
}

void StepRunner::add_job(SubmittedStep& step, SequenceState& sequence, int64_t row,
                         int64_t position) {
  SampleJob& job = step.jobs.emplace_back();
  job.row = row;
  job.state = &*sequence.sampler;
  job.position = position;
  step.job_sequences.push_back(&sequence);
}

// Submits those jobs of [first, end) that the device can do.
void StepRunner::submit_jobs(SubmittedStep& step, size_t first, size_t end) {
  step.device_rows.clear();
  step.device_jobs.clear();
  step.logprob_rows.clear();
  int32_t entries = 0;
  for (size_t i = first; i < end; ++i) {
    const SampleJob& job = step.jobs[i];
    if (!job.state->device_samples()) continue;
    const auto out = static_cast<int32_t>(step.device_rows.size());
    step.device_rows.push_back(job.state->device_row(job, out));
    step.device_jobs.push_back(static_cast<int32_t>(i));
    const int top = job.state->params().logprobs;
    if (top < 0) continue;
    step.logprob_rows.push_back({static_cast<int32_t>(job.row), out, top, entries});
    entries += 1 + top;
  }
  model_.outputs()->submit_sample(step.device_rows.data(),
                                  static_cast<int64_t>(step.device_rows.size()));
  if (const size_t n = step.logprob_rows.size())
    model_.outputs()->submit_logprobs(step.logprob_rows.data(), static_cast<int64_t>(n));
}

const StepPlan& StepRunner::collect() {
  SubmittedStep& step = oldest();
  oldest_ = 1 - oldest_;
  --in_flight_;
  try {
    finish(step);
  } catch (const Error& e) {
    fail(step.plan, e.code(), e.what());
  } catch (const std::exception& e) {
    fail(step.plan, ErrorCode::internal, e.what());
  }
  return step.plan;
}

void StepRunner::finish(SubmittedStep& step) {
  if (step.failure) std::rethrow_exception(step.failure);
  if (step.abandoned) {
    if (asynchronous_)
      model_.outputs()->abandon_steps();  // waits for copies of pages that the step began
    for (const PlannedSequence& planned : step.plan.sequences)
      if (planned.sequence) kv_.abandon_write(*planned.sequence->kv);
    scheduler_.abandoned();
    return;
  }
  if (asynchronous_) {
    read_jobs(step);
    read_logits(step);
  }
  commit_kv(step.plan);
  fork_choices(step);
  sample(step);
  for (size_t i = 0; i < step.jobs.size(); ++i)
    if (SequenceState* sequence = step.job_sequences[i]) commit_token(*sequence, step.jobs[i]);
  commit_logits(step);
  count(step);
}

// With overlap a step's time begins when the previous step has ended. A step that every sequence
// has left does not count, since it may have been collected long after its end.
void StepRunner::count(const SubmittedStep& step) {
  const auto& all = step.plan.sequences;
  const auto present = [](const PlannedSequence& planned) { return planned.sequence != nullptr; };
  if (std::none_of(all.begin(), all.end(), present)) return;
  const auto begin = std::max(step.start, last_end_);
  last_end_ = SubmittedStep::Clock::now();
  last_step_ms_ = std::chrono::duration<double, std::milli>(last_end_ - begin).count();
  scheduler_.observe(step.plan, last_step_ms_);
  ++steps_;
  steps_overlapped_ += step.overlapped;
}

void StepRunner::read_jobs(SubmittedStep& step) {
  tokens_.resize(step.device_jobs.size());
  model_.outputs()->read_tokens(tokens_.data());
  for (size_t i = 0; i < tokens_.size(); ++i) {
    SampleJob& job = step.jobs[step.device_jobs[i]];
    job.token = tokens_[i];
    job.finite = job.token >= 0;
    job.done = true;
  }
  if (!step.logprob_rows.empty()) read_logprobs(step);
}

void StepRunner::read_logprobs(SubmittedStep& step) {
  const LogprobRow& last = step.logprob_rows.back();
  logprobs_.resize(last.out + 1 + last.top);
  model_.outputs()->read_logprobs(logprobs_.data());
  for (const LogprobRow& row : step.logprob_rows) {
    SampleJob& job = step.jobs[step.device_jobs[row.sampled]];
    if (!job.finite) continue;
    const Logprob* entry = logprobs_.data() + row.out;
    job.logprobs.logprob = entry->logprob;
    job.logprobs.top.clear();
    for (int i = 1; i <= row.top; ++i)
      job.logprobs.top.emplace_back(entry[i].token, entry[i].logprob);
  }
}

// Reads the rows that the device does not sample: those of score and logits requests, and those
// that penalties, bias or bad words edit.
void StepRunner::read_logits(const SubmittedStep& step) {
  int64_t row = 0;
  for (size_t i = 0; i < step.plan.sequences.size(); row += step.logit_rows[i++]) {
    if (!step.plan.sequences[i].sequence || step.logit_rows[i] == 0 || step.device_index[i] >= 0)
      continue;
    grow_logits(step.batch.sample_rows.size());
    model_.outputs()->read_logits(row, step.logit_rows[i], logits_.data() + row * vocab_);
  }
}

void StepRunner::commit_kv(const StepPlan& plan) {
  for (const PlannedSequence& planned : plan.sequences) {
    if (!planned.sequence) continue;
    SequenceState& sequence = *planned.sequence;
    const int64_t prompt = sequence.request->prompt_tokens;
    if (planned.tokens > 1 || sequence.kv->written < prompt) tokens_prefilled_ += planned.tokens;
    const int64_t again = sequence.computed_to - sequence.kv->written;
    tokens_recomputed_ += std::clamp<int64_t>(again, 0, planned.tokens);
    kv_.commit_write(*sequence.kv, planned.tokens);
    if (sequence.choice == 0 && sequence.kv->length() == prompt)
      table_.progress(*sequence.request, sequence.kv->written);
  }
}

// Begins the other choices of a request whose prompt is complete: they share its pages and sample
// from the same logits.
void StepRunner::fork_choices(SubmittedStep& step) {
  const size_t first = step.jobs.size();
  for (size_t i = 0; i < first; ++i) {
    SequenceState* sequence = step.job_sequences[i];
    if (sequence && sequence->request->sequences.size() == 1 && sequence->request->params->n > 1)
      fork_choices(step, *sequence, step.jobs[i].row);
  }
  if (!asynchronous_) return;
  const size_t most = most_samples(scheduler_.slots());
  for (size_t at = first; at < step.jobs.size(); at += most) {
    submit_jobs(step, at, std::min(at + most, step.jobs.size()));
    read_jobs(step);
  }
}

void StepRunner::fork_choices(SubmittedStep& step, SequenceState& first, int64_t row) {
  RequestState& state = *first.request;
  for (int choice = 1; choice < state.params->n; ++choice) {
    auto owned = std::make_unique<SequenceState>();
    SequenceState& sequence = *owned;
    sequence.request = &state;
    sequence.choice = choice;
    sequence.computed_from = first.computed_from;
    sequence.sampler.emplace(*first.sampler);
    sequence.sampler->set_choice(choice);
    sequence.own_kv = kv_.fork(*first.kv);
    sequence.kv = &sequence.own_kv;
    state.sequences.push_back(std::move(owned));  // EngineCore::start() has reserved room
    add_job(step, sequence, row, sequence.kv->length());
  }
}

// Samples what the device has not sampled. Jobs of sequences that have left are skipped.
void StepRunner::sample(SubmittedStep& step) {
  bool all_done = true;
  for (size_t i = 0; i < step.jobs.size(); ++i) {
    SampleJob& job = step.jobs[i];
    job.done = job.done || !step.job_sequences[i];
    all_done = all_done && job.done;
    if (!job.done) job.logits = logits_.data() + job.row * vocab_;
  }
  if (all_done) return;  // the pool would be woken for nothing
  sampler_.sample(step.jobs.data(), static_cast<int64_t>(step.jobs.size()));
}

void StepRunner::commit_token(SequenceState& sequence, SampleJob& job) {
  if (sequence.finished) return;  // another choice failed the request
  if (!job.finite) return fail_not_finite(*sequence.request, job.position - 1);
  FinishReason reason = sequence.sampler->finish_of(job.token);
  sequence.sampler->accept(job.token);
  auto& tokens = sequence.kv->tokens;
  if (tokens.size() == tokens.capacity()) tokens.reserve(2 * tokens.size());
  table_.token(sequence, job.token, std::move(job.logprobs),
               sequence.request->params->logprobs >= 0);
  tokens.push_back(job.token);  // what is reported is committed, also out of memory
  ++tokens_decoded_;
  if (reason == FinishReason::none && sequence.kv->length() >= sequence.request->limit)
    reason = FinishReason::length;
  if (reason != FinishReason::none) {
    table_.finish(sequence, reason);
  } else if (sequence.slot < 0) {
    scheduler_.add(&sequence);  // a choice that has just begun
  }
}

void StepRunner::commit_logits(const SubmittedStep& step) {
  const float* logits = logits_.data();
  for (size_t i = 0; i < step.plan.sequences.size(); ++i) {
    const PlannedSequence& planned = step.plan.sequences[i];
    const int64_t rows = step.logit_rows[i], begin = planned.begin;
    const float* row = logits;
    logits += rows * vocab_;
    if (!planned.sequence) continue;
    SequenceState& sequence = *planned.sequence;
    RequestState& state = *sequence.request;
    if (state.generates() || sequence.finished) continue;
    // Rows are computed again after a preemption; those before `delivered` were taken already.
    const int64_t from = std::max(begin, state.delivered);
    const int64_t end = begin + rows;
    if (from < end) {
      row += (from - begin) * vocab_;
      const int64_t bad = state.options.kind == RequestKind::logits
                              ? take_logits(state, row, from, end)
                              : take_scores(state, row, from, end);
      state.delivered = end;
      if (bad >= 0) {
        fail_not_finite(state, bad);
        continue;
      }
    }
    if (sequence.kv->pending() == 0) table_.finish(sequence, FinishReason::stop);
  }
}

// Takes the logits of positions [begin, end), as take_scores() takes their scores. Both return the
// first position whose logits are not finite, or -1.
int64_t StepRunner::take_logits(RequestState& state, const float* logits, int64_t begin,
                                int64_t end) {
  for (int64_t i = 0; i < (end - begin) * vocab_; ++i)
    if (!std::isfinite(logits[i])) return begin + i / vocab_;
  auto& out = state.request->logits;
  out.insert(out.end(), logits, logits + (end - begin) * vocab_);
  return -1;
}

int64_t StepRunner::take_scores(RequestState& state, const float* logits, int64_t begin,
                                int64_t end) {
  auto& out = state.request->scores;
  out.resize(end);
  const int32_t* tokens = state.sequences[0]->kv->tokens.data();
  model_.context().pool.parallel_for(end - begin, 1, [&](int64_t b, int64_t e, int) {
    for (int64_t i = b; i < e; ++i)
      out[begin + i] = sampler_.logprob_of(logits + i * vocab_, tokens[begin + i + 1]);
  });
  for (int64_t i = begin; i < end; ++i)
    if (std::isnan(out[i])) return i;
  return -1;
}

void StepRunner::fail_not_finite(RequestState& state, int64_t position) {
  for (auto& sequence : state.sequences)
    if (!sequence->finished) kv_.discard(*sequence->kv, sequence->computed_from);
  table_.fail(
      state, ErrorCode::model,
      "logits at position " + std::to_string(position) + ": not finite, or every token is banned");
}

void StepRunner::fail(const StepPlan& plan, ErrorCode code, const char* what) {
  const bool followed = in_flight_ > 0;
  abandon();
  if (followed)
    for (const PlannedSequence& planned : oldest().plan.sequences)
      if (planned.sequence) kv_.abandon_write(*planned.sequence->kv);
  for (const PlannedSequence& planned : plan.sequences)
    if (planned.sequence) table_.fail(*planned.sequence->request, code, what);
}

}  // namespace turbomind
