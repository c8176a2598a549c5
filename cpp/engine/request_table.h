// The requests the engine is working on, and the events each of them will see.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/request_state.h"

namespace turbomind {

class RequestTable {
 public:
  // `leave` takes a run out of the scheduler and gives its sequence back; called once per run.
  explicit RequestTable(std::function<void(SequenceState&)> leave) : leave_(std::move(leave)) {}

  RequestState& add(std::unique_ptr<RequestState>&& state);  // throws with `state` as it was
  // A request that is refused: its terminal event without ever being in the table.
  void refuse(const RequestState& state, const Error& error);
  bool empty() const { return active_.empty(); }
  bool published() const { return touched_.empty(); }
  template <typename F>
  void for_each_sequence(F&& f) const {
    for (const auto& [id, state] : active_)
      for (const auto& sequence : state->sequences)
        if (!sequence->finished) f(*sequence);
  }

  void progress(RequestState& state, int64_t done);
  void token(SequenceState& sequence, int32_t token, TokenLogprobs logprobs, bool with_logprobs);
  // Each choice finishes once; the last one makes the event terminal, and the state is gone after
  // the next publish().
  void finish(SequenceState& sequence, FinishReason reason);
  // Finishes every choice that is still open, those that were never begun included.
  void finish_all(RequestState& state, FinishReason reason);
  void fail(RequestState& state, ErrorCode code, const std::string& what);
  void finish_cancelled();
  // Every request; for shutdown and for failures that cannot be put down to one of them.
  void finish_everything(FinishReason reason, ErrorCode code, const std::string& what);

  // Hands out the events since the last call and wakes their readers. This and whatever ends
  // requests can be called again after it threw for lack of memory: nothing is lost or told twice.
  void publish();

 private:
  void touch(RequestState& state) {
    if (state.events.empty()) touched_.push_back(&state);
  }
  void end(RequestState& state, FinishReason reason, ErrorCode code, const std::string& what);
  void end_choice(RequestState& state, int choice, FinishReason reason, ErrorCode code,
                  const std::string& what);
  void leave(SequenceState& sequence);

  std::function<void(SequenceState&)> leave_;
  using States = std::map<uint64_t, std::unique_ptr<RequestState>>;  // by request id
  States active_;
  States ended_;                        // nodes of active_, so that ending one needs no memory
  std::vector<RequestState*> touched_;  // have events
  std::vector<RequestState*> scratch_;
};

}  // namespace turbomind
