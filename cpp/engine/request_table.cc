#include "engine/request_table.h"

#include <algorithm>
#include <utility>

namespace turbomind {

RequestState& RequestTable::add(std::unique_ptr<RequestState>&& state) {
  RequestState& s = *state;
  s.open_choices = s.params->n;
  s.choice_done.assign(s.open_choices, false);
  active_.try_emplace(s.request->id(), std::move(state));
  return s;
}

void RequestTable::refuse(const RequestState& state, const Error& error) {
  std::vector<Event> events(state.params->n);
  for (int choice = 0; choice < state.params->n; ++choice) {
    Event& event = events[choice];
    event.choice = choice;
    event.finish = FinishReason::error;
    event.error_code = error.code();
    event.error = error.what();
    event.prompt_tokens = state.prompt_tokens;
  }
  events.back().terminal = true;
  state.request->publish(std::move(events));
}

void RequestTable::progress(RequestState& state, int64_t done) {
  touch(state);
  Event& event = state.events.emplace_back();
  // A preempted prompt is computed again; the reported progress does not fall.
  state.progress = std::max(state.progress, done);
  event.progress_done = state.progress;
  event.progress_total = state.prompt_tokens;
  event.reused_tokens = state.reused_tokens;
}

void RequestTable::token(SequenceState& sequence, int32_t token, TokenLogprobs logprobs,
                         bool with_logprobs) {
  RequestState& state = *sequence.request;
  touch(state);
  Event& event = state.events.emplace_back();
  event.choice = sequence.choice;
  event.token_ids.push_back(token);
  if (with_logprobs) event.logprobs.push_back(std::move(logprobs));
}

void RequestTable::leave(SequenceState& sequence) {
  if (std::exchange(sequence.finished, true)) return;
  leave_(sequence);
}

void RequestTable::finish(SequenceState& sequence, FinishReason reason) {
  leave(sequence);
  end_choice(*sequence.request, sequence.choice, reason, ErrorCode::internal, "");
}

void RequestTable::end_choice(RequestState& state, int choice, FinishReason reason, ErrorCode code,
                              const std::string& what) {
  Event event;
  event.choice = choice;
  event.finish = reason;
  event.terminal = state.open_choices == 1;
  event.error_code = code;
  event.error = what;
  event.prompt_tokens = state.prompt_tokens;
  event.reused_tokens = state.reused_tokens;
  event.loaded_tokens = state.loaded_tokens;
  event.foreign_tokens = state.foreign_tokens;
  touch(state);
  state.events.push_back(std::move(event));
  // Nothing throws from here on: the event is in the list, so the choice is done.
  state.choice_done[choice] = true;
  if (--state.open_choices == 0) ended_.insert(active_.extract(state.request->id()));
}

void RequestTable::end(RequestState& state, FinishReason reason, ErrorCode code,
                       const std::string& what) {
  for (auto& sequence : state.sequences) leave(*sequence);
  for (size_t choice = 0; choice < state.choice_done.size(); ++choice)
    if (!state.choice_done[choice]) end_choice(state, static_cast<int>(choice), reason, code, what);
}

void RequestTable::finish_all(RequestState& state, FinishReason reason) {
  end(state, reason, ErrorCode::internal, "");
}

void RequestTable::fail(RequestState& state, ErrorCode code, const std::string& what) {
  end(state, FinishReason::error, code, what);
}

void RequestTable::finish_cancelled() {
  scratch_.clear();
  for (auto& [id, state] : active_)
    if (state->request->cancelled()) scratch_.push_back(state.get());
  for (RequestState* state : scratch_) finish_all(*state, FinishReason::cancelled);
  scratch_.clear();
  for (auto& [id, state] : active_)
    if (state->request->any_choice_cancelled()) scratch_.push_back(state.get());
  for (RequestState* state : scratch_) finish_cancelled_choices(*state);
}

void RequestTable::finish_cancelled_choices(RequestState& state) {
  // The first choice computes the prompt for all of them, and forks the others from it.
  if (state.sequences.size() != state.choice_done.size()) return;
  for (auto& sequence : state.sequences) {
    const int choice = sequence->choice;
    if (state.choice_done[choice] || !state.request->choice_cancelled(choice)) continue;
    leave(*sequence);
    end_choice(state, choice, FinishReason::cancelled, ErrorCode::internal, "");
  }
}

void RequestTable::finish_everything(FinishReason reason, ErrorCode code, const std::string& what) {
  scratch_.clear();
  for (auto& [id, state] : active_) scratch_.push_back(state.get());
  for (RequestState* state : scratch_) end(*state, reason, code, what);
}

void RequestTable::publish() {
  for (RequestState* state : touched_) {
    state->request->publish(std::move(state->events));
    state->events.clear();
  }
  touched_.clear();
  ended_.clear();
}

}  // namespace turbomind
