#include "engine/step_runner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include "core/error.h"

namespace turbomind {

namespace {

// Rows of the step whose logits a planned row wants: all of a logits request, all but the last of a
// score request (they predict the token that follows), the last one of a sequence that is complete.
int64_t sampled_rows(const PlannedRow& row) {
  const Sequence& seq = *row.run->seq;
  const bool complete = row.tokens == seq.pending();
  switch (row.run->request->options.kind) {
    case RequestKind::logits:
      return row.tokens;
    case RequestKind::score:
      return row.tokens - complete;
    case RequestKind::generate:
      break;
  }
  return complete;
}

}  // namespace

StepRunner::StepRunner(Model& model, KvCache& kv, Scheduler& scheduler, RequestTable& table,
                       const std::atomic<bool>& stop)
    : model_(model),
      kv_(kv),
      scheduler_(scheduler),
      table_(table),
      stop_(stop),
      sampler_(model.context(), model.vocab()),
      vocab_(model.vocab()) {}

void StepRunner::run(const StepPlan& plan) {
  try {
    execute(plan);
  } catch (const Error& e) {
    fail(plan, e.code(), e.what());
  } catch (const std::exception& e) {
    fail(plan, ErrorCode::internal, e.what());
  }
}

void StepRunner::execute(const StepPlan& plan) {
  const auto start = std::chrono::steady_clock::now();
  build(plan);
  const bool keeps = model_.keeps_logits();
  if (!model_.forward(batch_, keeps ? nullptr : logits_.data(), &cancel_)) {
    for (const PlannedRow& row : plan.rows) kv_.abandon_write(*row.run->seq);
    scheduler_.abandoned();
    return;
  }
  if (keeps) fetch_logits(plan);
  commit_kv(plan);
  build_jobs(plan);
  if (keeps) sample_on_device();
  sampler_.sample(jobs_.data(), static_cast<int64_t>(jobs_.size()));
  for (size_t i = 0; i < jobs_.size(); ++i) commit_token(*job_runs_[i], jobs_[i]);
  commit_logits(plan);
  const std::chrono::duration<double, std::milli> ms = std::chrono::steady_clock::now() - start;
  last_step_ms_ = ms.count();
  scheduler_.observe(plan, last_step_ms_);
  ++steps_;
}

void StepRunner::build(const StepPlan& plan) {
  batch_.token_ids.clear();
  batch_.positions.clear();
  batch_.sample_rows.clear();
  batch_.rows.resize(plan.rows.size());
  logit_rows_.clear();
  cancel_.flags.assign(1, &stop_);
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const PlannedRow& planned = plan.rows[i];
    const Sequence& seq = *planned.run->seq;
    const int64_t q_begin = static_cast<int64_t>(batch_.token_ids.size());
    StepRow& row = batch_.rows[i];
    row.q_begin = q_begin;
    row.q_len = planned.tokens;
    row.kv_begin = seq.written;
    row.adapter = seq.adapter;
    row.pages.clear();
    for (const auto& table : seq.pages) row.pages.push_back(table.data());
    for (int64_t t = seq.written; t < seq.written + planned.tokens; ++t) {
      batch_.token_ids.push_back(seq.tokens[t]);
      batch_.positions.push_back(static_cast<int32_t>(t));
    }
    const int64_t wanted = sampled_rows(planned);
    logit_rows_.push_back(wanted);
    // Of a generating sequence the last row; else the first ones.
    const int64_t from = planned.run->request->generates() ? q_begin + planned.tokens - 1 : q_begin;
    for (int64_t r = 0; r < wanted; ++r)
      batch_.sample_rows.push_back(static_cast<int32_t>(from + r));
    if (seq.pending() > 1) cancel_.flags.push_back(planned.run->request->request->cancel_flag());
  }
  if (!model_.keeps_logits()) make_room(batch_.sample_rows.size());
}

void StepRunner::make_room(size_t rows) {
  if (logits_.size() < rows * vocab_) logits_.resize(rows * vocab_);
}

// What is not sampled where it is comes to the host: rows of score and logits requests, and rows
// that processors edit or whose log-probabilities are wanted.
void StepRunner::fetch_logits(const StepPlan& plan) {
  int64_t row = 0;
  for (size_t i = 0; i < plan.rows.size(); row += logit_rows_[i++]) {
    const Run& run = *plan.rows[i].run;
    const bool stays = run.request->generates() && run.sampler->device_samples();
    if (logit_rows_[i] == 0 || stays) continue;
    make_room(batch_.sample_rows.size());
    model_.read_logits(row, logit_rows_[i], logits_.data() + row * vocab_);
  }
}

void StepRunner::commit_kv(const StepPlan& plan) {
  for (const PlannedRow& planned : plan.rows) {
    Run& run = *planned.run;
    const int64_t prompt = run.request->prompt_tokens;
    if (planned.tokens > 1 || run.seq->written < prompt) tokens_prefilled_ += planned.tokens;
    kv_.commit_write(*run.seq, planned.tokens);
    if (run.choice == 0 && run.seq->length() == prompt)
      table_.progress(*run.request, run.seq->written);
  }
}

void StepRunner::build_jobs(const StepPlan& plan) {
  jobs_.clear();
  job_runs_.clear();
  int64_t row = 0;
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    Run& run = *plan.rows[i].run;
    if (run.request->generates() && run.seq->pending() == 0) {
      add_job(run, row);
      if (run.request->runs.size() == 1 && run.request->params->n > 1) fork_choices(run, row);
    }
    row += logit_rows_[i];
  }
}

void StepRunner::add_job(Run& run, int64_t row) {
  SampleJob& job = jobs_.emplace_back();
  job.row = row;
  job.logits = logits_.data() + row * vocab_;
  job.state = &*run.sampler;
  job.position = run.seq->length();
  job_runs_.push_back(&run);
}

// The prompt is complete: the other choices share its pages, and draw from the same logits.
void StepRunner::fork_choices(Run& first, int64_t row) {
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
    add_job(run, row);
  }
}

void StepRunner::sample_on_device() {
  device_rows_.clear();
  for (size_t i = 0; i < jobs_.size(); ++i)
    if (jobs_[i].state->device_samples())
      device_rows_.push_back(jobs_[i].state->device_row(jobs_[i], static_cast<int32_t>(i)));
  if (device_rows_.empty()) return;
  device_tokens_.resize(jobs_.size());
  model_.sample(device_rows_.data(), static_cast<int64_t>(device_rows_.size()),
                device_tokens_.data());
  for (const DeviceSampleRow& row : device_rows_) {
    SampleJob& job = jobs_[row.out];
    job.token = device_tokens_[row.out];
    job.finite = job.token >= 0;
    job.done = true;
  }
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

void StepRunner::commit_logits(const StepPlan& plan) {
  const float* logits = logits_.data();
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    Run& run = *plan.rows[i].run;
    const int64_t rows = logit_rows_[i], begin = run.seq->written - plan.rows[i].tokens;
    const float* row = logits;
    logits += rows * vocab_;
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
  for (const PlannedRow& row : plan.rows) table_.fail(*row.run->request, code, what);
}

}  // namespace turbomind
