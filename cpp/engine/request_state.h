// The engine thread's records of a request and of its sequences. What the submitter sees of it is
// Request (engine/event.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "cache/sequence.h"
#include "engine/event.h"
#include "engine/handle.h"
#include "engine/request_options.h"
#include "sampling/sampler.h"
#include "tiers/fetch/fetch_state.h"

namespace turbomind {

struct RequestState;

// One choice of a request while it is generated or scored (vLLM: a Sequence of a SequenceGroup).
struct SequenceState {
  RequestState* request = nullptr;
  int choice = 0;
  Sequence own_kv;                      // of a stateless request
  Sequence* kv = nullptr;               // tokens and pages: &own_kv, or the handle's
  std::optional<SamplerState> sampler;  // RequestKind::generate
  int slot = -1;                        // in the persistent batch; -1: it waits for one
  bool admitted = false;                // it had a slot before
  bool finished = false;
  int passed = 0;               // others that ranked after it and got a slot before it
  int preemptions = 0;          // of this sequence, for lack of pages
  int64_t computed_from = 0;    // first token whose KV this request computed or loaded
  int64_t computed_to = 0;      // first token whose KV it never had, as far as it lost KV
  FetchState* fetch = nullptr;  // the tiers' record of it; null: there are none

  // Of a waiting sequence: the slot and request of one that computes tokens [0, awaited) of a
  // prefix that both have. Slot -1: none does. Stale once the slot has another request.
  int leader_slot = -1;
  uint64_t leader_arrival = 0;
  int64_t awaited = 0;
  bool counted_awaiting = false;

  // Returns whether it is set aside until pages of a lower tier have been loaded.
  bool fetching() const { return fetch && fetch->fetching(); }
  // The same as FetchState::hole_end(); kNoToken without lower tiers.
  int64_t hole_end() const { return fetch ? fetch->hole_end() : kNoToken; }
};

// Numbers of tokens include the prompt's, unless a comment excludes them.
struct RequestState {
  std::shared_ptr<Request> request;
  std::shared_ptr<const SamplingParams> params;
  RequestOptions options;
  uint64_t arrival = 0;  // requests in order of arrival
  std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();
  HandleId handle = 0;  // 0: stateless
  int64_t prompt_tokens = 0;
  int64_t reused_tokens = 0;   // KV was on the device or was loaded
  int64_t loaded_tokens = 0;   // of them, loaded from a lower tier
  int64_t foreign_tokens = 0;  // of them, of another numerics fingerprint
  int64_t progress = 0;        // tokens last reported as done
  int64_t limit = 0;           // length at which a sequence of it finishes, in tokens
  int64_t delivered = 0;       // score, logits: rows of logits already taken
  std::vector<std::unique_ptr<SequenceState>> sequences;  // choices that have begun
  int open_choices = 0;
  std::vector<bool> choice_done;  // [choice]
  std::vector<Event> events;      // not yet published

  // Returns the number of first tokens whose logits are not needed any more, so that their KV may
  // come from a cache.
  int64_t reusable(const SequenceState& sequence) const {
    return generates() ? sequence.kv->length() - 1 : delivered;
  }
  bool generates() const { return options.kind == RequestKind::generate; }
};

// Rank of sequences: lower priority number, then arrival, then choice. The first is served first
// and preempted last.
inline bool ranks_before(const SequenceState& a, const SequenceState& b) {
  const auto rank = [](const SequenceState& s) {
    return std::make_tuple(s.request->options.priority, s.request->arrival, s.choice);
  };
  return rank(a) < rank(b);
}

struct ByRank {
  bool operator()(const SequenceState* a, const SequenceState* b) const {
    return ranks_before(*a, *b);
  }
};

}  // namespace turbomind
