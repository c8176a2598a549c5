#include "engine/step_runner.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "core/error.h"

namespace turbomind {

namespace {

// After the step, which may not have come to its end, every token of the sequence is computed.
bool completes(const PlannedRow& row) {
  return row.begin + row.tokens >= row.run->seq->length();
}

// Rows of the step whose logits a planned row wants: all of a logits request, all but the last of a
// score request (they predict the token that follows), the last one of a sequence that is complete.
int64_t sampled_rows(const PlannedRow& row) {
  switch (row.run->request->options.kind) {
    case RequestKind::logits:
      return row.tokens;
    case RequestKind::score:
      return row.tokens - completes(row);
    case RequestKind::generate:
      break;
  }
  return completes(row);
}

}  // namespace

StepRunner::StepRunner(Model& model, KvCache& kv, Scheduler& scheduler, RequestTable& table,
                       const std::atomic<bool>& stop)
    : model_(model),
      asynchronous_(model.asynchronous()),
      kv_(kv),
      scheduler_(scheduler),
      table_(table),
      stop_(stop),
      sampler_(model.context(), model.vocab()),
      vocab_(model.vocab()) {}

const StepPlan* StepRunner::to_follow() const {
  const SubmittedStep& step = slots_[oldest_];
  const bool may = asynchronous_ && in_flight_ == 1 && !step.failure && !step.abandoned;
  return may && !step.needs_host ? &step.plan : nullptr;
}

void StepRunner::leave(const Run& run) {
  if (in_flight_ > 0) oldest().forget(run);
  if (in_flight_ > 1) behind().forget(run);
}

void StepRunner::abandon() {
  model_.abandon_steps();
  in_flight_ = 0;
}

void StepRunner::submit(StepPlan& plan) {
  const SubmittedStep* before = in_flight_ > 0 ? &oldest() : nullptr;
  SubmittedStep& step = before ? behind() : oldest();
  step.begin(before != nullptr);
  std::swap(step.plan, plan);
  ++in_flight_;
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
  batch.rows.resize(step.plan.rows.size());
  step.logit_rows.clear();
  cancel_.flags.assign(1, &stop_);
  bool follows = false;
  for (size_t i = 0; i < step.plan.rows.size(); ++i) {
    add_row(step, i, before);
    follows = follows || step.plan.rows[i].after >= 0;
  }
  if (!follows) batch.token_from.clear();
  if (!asynchronous_) make_room(batch.sample_rows.size());
}

void StepRunner::add_row(SubmittedStep& step, size_t i, const SubmittedStep* before) {
  StepBatch& batch = step.batch;
  const PlannedRow& planned = step.plan.rows[i];
  const Sequence& seq = *planned.run->seq;
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
    if (before) batch.token_from.push_back(planned.after < 0 ? -1 : before->drawn[planned.after]);
    batch.positions.push_back(static_cast<int32_t>(t));
  }
  const int64_t wanted = sampled_rows(planned);
  step.logit_rows.push_back(wanted);
  // Of a generating sequence the last row; else the first ones.
  const int64_t from = planned.run->request->generates() ? q_begin + planned.tokens - 1 : q_begin;
  for (int64_t r = 0; r < wanted; ++r) batch.sample_rows.push_back(static_cast<int32_t>(from + r));
  if (!before && seq.pending() > 1)
    cancel_.flags.push_back(planned.run->request->request->cancel_flag());
}

void StepRunner::make_room(size_t rows) {
  if (logits_.size() < rows * vocab_) logits_.resize(rows * vocab_);
}

void StepRunner::build_jobs(SubmittedStep& step) {
  step.drawn.clear();
  step.needs_host = false;
  int32_t on_device = 0;
  int64_t row = 0;
  for (size_t i = 0; i < step.plan.rows.size(); ++i) {
    const PlannedRow& planned = step.plan.rows[i];
    Run& run = *planned.run;
    const bool draws = run.request->generates() && completes(planned);
    if (draws) add_job(step, run, row, planned.begin + planned.tokens);
    const bool device = draws && asynchronous_ && run.sampler->device_samples();
    step.drawn.push_back(device ? on_device++ : -1);
    step.needs_host = step.needs_host || (step.logit_rows[i] > 0 && !device);
    row += step.logit_rows[i];
  }
}

void StepRunner::add_job(SubmittedStep& step, Run& run, int64_t row, int64_t position) {
  SampleJob& job = step.jobs.emplace_back();
  job.row = row;
  job.state = &*run.sampler;
  job.position = position;
  step.job_runs.push_back(&run);
}

// Those of [first, end) that the device can do.
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
  model_.submit_sample(step.device_rows.data(), static_cast<int64_t>(step.device_rows.size()));
  if (const size_t n = step.logprob_rows.size())
    model_.submit_logprobs(step.logprob_rows.data(), static_cast<int64_t>(n));
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
    model_.abandon_steps();  // pages that were copied for it are there before anybody reads them
    for (const PlannedRow& row : step.plan.rows)
      if (row.run) kv_.abandon_write(*row.run->seq);
    scheduler_.abandoned();
    return;
  }
  if (asynchronous_) {
    read_jobs(step);
    fetch_logits(step);
  }
  commit_kv(step.plan);
  fork_choices(step);
  sample(step);
  for (size_t i = 0; i < step.jobs.size(); ++i)
    if (Run* run = step.job_runs[i]) commit_token(*run, step.jobs[i]);
  commit_logits(step);
  count(step);
}

// With overlap a step's time begins when the one before it has ended. A step that everybody has
// left does not count, and may have been left alone for long.
void StepRunner::count(const SubmittedStep& step) {
  const auto& rows = step.plan.rows;
  if (std::none_of(rows.begin(), rows.end(), [](const PlannedRow& row) { return row.run; })) return;
  const auto begin = std::max(step.start, last_end_);
  last_end_ = SubmittedStep::Clock::now();
  last_step_ms_ = std::chrono::duration<double, std::milli>(last_end_ - begin).count();
  scheduler_.observe(step.plan, last_step_ms_);
  ++steps_;
  steps_overlapped_ += step.ahead;
}

void StepRunner::read_jobs(SubmittedStep& step) {
  tokens_.resize(step.device_jobs.size());
  model_.read_tokens(tokens_.data());
  for (size_t i = 0; i < tokens_.size(); ++i) {
    SampleJob& job = step.jobs[step.device_jobs[i]];
    job.token = tokens_[i];
    job.finite = job.token >= 0;
    job.done = true;
  }
  if (!step.logprob_rows.empty()) read_logprobs(step);
}

void StepRunner::read_logprobs(SubmittedStep& step) {
  const DeviceLogprobRow& last = step.logprob_rows.back();
  logprobs_.resize(last.out + 1 + last.top);
  model_.read_logprobs(logprobs_.data());
  for (const DeviceLogprobRow& row : step.logprob_rows) {
    SampleJob& job = step.jobs[step.device_jobs[row.drawn]];
    if (!job.finite) continue;
    const DeviceLogprob* entry = logprobs_.data() + row.out;
    job.logprobs.logprob = entry->logprob;
    job.logprobs.top.clear();
    for (int i = 1; i <= row.top; ++i)
      job.logprobs.top.emplace_back(entry[i].token, entry[i].logprob);
  }
}

// What is not sampled where it is comes to the host: rows of score and logits requests, and rows
// that processors edit.
void StepRunner::fetch_logits(const SubmittedStep& step) {
  int64_t row = 0;
  for (size_t i = 0; i < step.plan.rows.size(); row += step.logit_rows[i++]) {
    if (!step.plan.rows[i].run || step.logit_rows[i] == 0 || step.drawn[i] >= 0) continue;
    make_room(step.batch.sample_rows.size());
    model_.read_logits(row, step.logit_rows[i], logits_.data() + row * vocab_);
  }
}

void StepRunner::commit_kv(const StepPlan& plan) {
  for (const PlannedRow& planned : plan.rows) {
    if (!planned.run) continue;
    Run& run = *planned.run;
    const int64_t prompt = run.request->prompt_tokens;
    if (planned.tokens > 1 || run.seq->written < prompt) tokens_prefilled_ += planned.tokens;
    kv_.commit_write(*run.seq, planned.tokens);
    if (run.choice == 0 && run.seq->length() == prompt)
      table_.progress(*run.request, run.seq->written);
  }
}

// Where a prompt is complete: the other choices share its pages, and draw from the same logits.
void StepRunner::fork_choices(SubmittedStep& step) {
  const size_t first = step.jobs.size();
  for (size_t i = 0; i < first; ++i) {
    Run* run = step.job_runs[i];
    if (run && run->request->runs.size() == 1 && run->request->params->n > 1)
      fork_choices(step, *run, step.jobs[i].row);
  }
  if (!asynchronous_) return;
  const size_t most = most_draws(static_cast<int64_t>(scheduler_.rows().size()));
  for (size_t at = first; at < step.jobs.size(); at += most) {
    submit_jobs(step, at, std::min(at + most, step.jobs.size()));
    read_jobs(step);
  }
}

void StepRunner::fork_choices(SubmittedStep& step, Run& first, int64_t row) {
  RequestState& state = *first.request;
  for (int choice = 1; choice < state.params->n; ++choice) {
    auto owned = std::make_unique<Run>();
    Run& run = *owned;
    run.request = &state;
    run.choice = choice;
    run.computed_from = first.computed_from;
    run.sampler.emplace(*first.sampler);
    run.sampler->set_choice(choice);
    run.own = kv_.fork(*first.seq);
    run.seq = &run.own;
    state.runs.push_back(std::move(owned));  // there is room: see EngineCore::start
    add_job(step, run, row, run.seq->length());
  }
}

// What the device has not drawn. Jobs of runs that have left are nobody's.
void StepRunner::sample(SubmittedStep& step) {
  bool all_done = true;
  for (size_t i = 0; i < step.jobs.size(); ++i) {
    SampleJob& job = step.jobs[i];
    job.done = job.done || !step.job_runs[i];
    all_done = all_done && job.done;
    if (!job.done) job.logits = logits_.data() + job.row * vocab_;
  }
  if (all_done) return;  // else every thread would be woken to find that out
  sampler_.sample(step.jobs.data(), static_cast<int64_t>(step.jobs.size()));
}

void StepRunner::commit_token(Run& run, SampleJob& job) {
  if (run.finished) return;  // another choice failed the request
  if (!job.finite) return fail_not_finite(*run.request, job.position - 1);
  FinishReason reason = run.sampler->finish_of(job.token);
  run.sampler->accept(job.token);
  auto& tokens = run.seq->tokens;
  if (tokens.size() == tokens.capacity()) tokens.reserve(2 * tokens.size());
  table_.token(run, job.token, std::move(job.logprobs), run.request->params->logprobs >= 0);
  tokens.push_back(job.token);  // what is reported is committed, even when memory ends
  ++tokens_decoded_;
  if (reason == FinishReason::none && run.seq->length() >= run.request->limit)
    reason = FinishReason::length;
  if (reason != FinishReason::none) {
    table_.finish(run, reason);
  } else if (run.row < 0) {
    scheduler_.add(&run);  // a choice that was just forked
  }
}

void StepRunner::commit_logits(const SubmittedStep& step) {
  const float* logits = logits_.data();
  for (size_t i = 0; i < step.plan.rows.size(); ++i) {
    const PlannedRow& planned = step.plan.rows[i];
    const int64_t rows = step.logit_rows[i], begin = planned.begin;
    const float* row = logits;
    logits += rows * vocab_;
    if (!planned.run) continue;
    Run& run = *planned.run;
    RequestState& state = *run.request;
    if (state.generates() || run.finished) continue;
    // After a preemption rows come again; those before `delivered` were taken then.
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
    if (run.seq->pending() == 0) table_.finish(run, FinishReason::stop);
  }
}

// Both return the first position whose logits are not finite, or -1.
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
  const int32_t* tokens = state.runs[0]->seq->tokens.data();
  model_.context().pool.parallel_for(end - begin, 1, [&](int64_t b, int64_t e, int) {
    for (int64_t i = b; i < e; ++i)
      out[begin + i] = sampler_.logprob_of(logits + i * vocab_, tokens[begin + i + 1]);
  });
  for (int64_t i = begin; i < end; ++i)
    if (std::isnan(out[i])) return i;
  return -1;
}

void StepRunner::fail_not_finite(RequestState& state, int64_t position) {
  for (auto& run : state.runs)
    if (!run->finished) kv_.discard(*run->seq, run->computed_from);
  table_.fail(
      state, ErrorCode::model,
      "logits at position " + std::to_string(position) + ": not finite, or every token is banned");
}

void StepRunner::fail(const StepPlan& plan, ErrorCode code, const char* what) {
  const bool followed = in_flight_ > 0;
  abandon();
  if (followed)
    for (const PlannedRow& row : oldest().plan.rows)
      if (row.run) kv_.abandon_write(*row.run->seq);
  for (const PlannedRow& row : plan.rows)
    if (row.run) table_.fail(*row.run->request, code, what);
}

}  // namespace turbomind
