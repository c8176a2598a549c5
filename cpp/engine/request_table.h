// The requests the engine is working on, and the events that are not yet published. Every request
// gets exactly one terminal event through this table.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/request_state.h"

namespace turbomind {

// Used by the engine thread. publish() and the methods that end requests can be called again after
// they threw for lack of memory: no event is lost or repeated.
class RequestTable {
 public:
  // `leave` removes a sequence from the scheduler and releases it; called once per sequence.
  explicit RequestTable(std::function<void(SequenceState&)> leave) : leave_(std::move(leave)) {}

  // Adds a request. When it throws, `state` is unchanged.
  RequestState& add(std::unique_ptr<RequestState>&& state);
  // Publishes the terminal error events of a request that was not added.
  void refuse(const RequestState& state, const Error& error);
  bool empty() const { return active_.empty(); }
  // Returns whether there are no events to publish.
  bool published() const { return touched_.empty(); }
  // Calls f(sequence) for each sequence that has not finished.
  template <typename F>
  void for_each_sequence(F&& f) const {
    for (const auto& [id, state] : active_)
      for (const auto& sequence : state->sequences)
        if (!sequence->finished) f(*sequence);
  }

  // Adds an event: `done` prompt tokens have KV.
  void progress(RequestState& state, int64_t done);
  // Adds an event: a sampled token.
  void token(SequenceState& sequence, int32_t token, TokenLogprobs logprobs, bool with_logprobs);
  // Finishes a choice. The last one makes the event terminal, and the next publish() deletes the
  // state.
  void finish(SequenceState& sequence, FinishReason reason);
  // Finishes every choice that is still open, also those that were never begun.
  void finish_all(RequestState& state, FinishReason reason);
  void fail(RequestState& state, ErrorCode code, const std::string& what);
  // Finishes the requests and the choices that were cancelled.
  void finish_cancelled();
  // Finishes every request: for shutdown, and for failures that no single request has caused.
  void finish_everything(FinishReason reason, ErrorCode code, const std::string& what);

  // Publishes the events since the last call and wakes their readers.
  void publish();

 private:
  void touch(RequestState& state) {
    if (state.events.empty()) touched_.push_back(&state);
  }
  void end(RequestState& state, FinishReason reason, ErrorCode code, const std::string& what);
  void end_choice(RequestState& state, int choice, FinishReason reason, ErrorCode code,
                  const std::string& what);
  void finish_cancelled_choices(RequestState& state);
  void leave(SequenceState& sequence);

  std::function<void(SequenceState&)> leave_;
  using States = std::map<uint64_t, std::unique_ptr<RequestState>>;  // by request id
  States active_;
  States ended_;                        // nodes of active_: ending a request needs no memory
  std::vector<RequestState*> touched_;  // those with events
  std::vector<RequestState*> scratch_;
};

}  // namespace turbomind
