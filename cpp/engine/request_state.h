// The engine thread's side of a request.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "cache/sequence.h"
#include "engine/engine.h"
#include "sampling/sampler.h"

namespace turbomind {

struct RequestState;

// One choice of a request: a sequence that wants steps.
struct Run {
  RequestState* request = nullptr;
  int choice = 0;
  Sequence own;                         // of a stateless request
  Sequence* seq = nullptr;              // &own, or the handle's
  std::optional<SamplerState> sampler;  // RequestKind::generate
  int row = -1;                         // place in the persistent batch; -1: waiting
  bool admitted = false;                // had a row before
  bool finished = false;
  int64_t computed_from = 0;  // first token whose KV this request computed or loaded
  // Pages of the tiers below:
  bool fetching = false;     // set aside until they are there
  bool fetch_tried = false;  // since it had a row last
  int failed_fetches = 0;
  // Behind pages that are to be computed, the token from which on there are pages again: there it
  // is looked again. kUnknown: not known yet; kNoToken: none.
  static constexpr int64_t kUnknown = -1;
  int64_t gap_end = kUnknown;
  int64_t crossed_from = kNoToken;  // tokens it had when it was there, and nobody counted on
  int64_t loaded_tokens = 0;
  int64_t first_loaded = kNoToken;
};

struct RequestState {
  std::shared_ptr<Request> request;
  std::shared_ptr<const SamplingParams> params;
  RequestOptions options;
  uint64_t arrival = 0;
  HandleId handle = 0;  // 0: stateless
  int64_t prompt_tokens = 0;
  int64_t reused_tokens = 0;               // KV was there or was brought
  int64_t loaded_tokens = 0;               // of them, brought up from a lower tier
  int64_t foreign_tokens = 0;              // of them, of another numerics fingerprint
  int64_t progress = 0;                    // prompt tokens last reported as done
  int64_t limit = 0;                       // length at which a sequence of it finishes
  int64_t delivered = 0;                   // score, logits: rows of logits already taken
  std::vector<std::unique_ptr<Run>> runs;  // of choices that were begun
  int open_choices = 0;
  std::vector<bool> choice_done;
  std::vector<Event> events;  // not yet published

  // Tokens whose logits nobody waits for any more, so their KV may come from elsewhere.
  int64_t reusable(const Run& run) const { return generates() ? run.seq->length() - 1 : delivered; }
  bool generates() const { return options.kind == RequestKind::generate; }
};

// Served first; also the last to be preempted.
inline bool ranks_before(const Run& a, const Run& b) {
  const auto rank = [](const Run& r) {
    return std::make_tuple(r.request->options.priority, r.request->arrival, r.choice);
  };
  return rank(a) < rank(b);
}

struct ByRank {
  bool operator()(const Run* a, const Run* b) const { return ranks_before(*a, *b); }
};

}  // namespace turbomind
