// The part of Scheduler that gives slots and pages to sequences and takes them away.
#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "engine/step/scheduler.h"

namespace turbomind {

namespace {

// Most sequences that get a slot before one that ranks before them, because more of their prefix is
// cached (ageing).
constexpr int kMostPassed = 8;
constexpr int kMostCompared = 16;  // waiting sequences whose cached prefixes are compared
constexpr int64_t kMostPagesCompared = 2048;  // of them in all, since each costs a lookup
// A sequence does not wait a step for fewer tokens of a prefix in flight, unless they are half of
// what it would compute.
constexpr int64_t kLeastAwaited = kPageTokens / 2;
// Fewer tokens than these, such as the first ones of every dialogue, are not worth that both
// sequences copy a page; of a prefix that was waited for every token is.
constexpr int64_t kLeastShared = 8;
// A preempted sequence needs this times more room than before the preemption to get a slot again.
constexpr double kMoreRoom = 4;

}  // namespace

void Scheduler::admit() {
  const auto free_slot = [this] { return std::find(slots_.begin(), slots_.end(), nullptr); };
  while (SequenceState* sequence = next_ready()) {
    SequenceState* loser = free_slot() == slots_.end() ? outranked_by(*sequence) : nullptr;
    if (!loser && free_slot() == slots_.end()) return;
    resume(*sequence);
    if (set_aside(*sequence) || find_leader(*sequence)) continue;
    // No sequence passes one that waits for pages, which could otherwise wait for ever.
    const bool others = slots_in_use() > 0;
    if (!make_room(*sequence) && (others || (tiers_ && tiers_->fetching()))) return;
    if (others && !make_growth_room(*sequence)) return;
    if (set_aside(*sequence)) continue;                    // there is room for a fetch now
    if (free_slot() == slots_.end()) release_slot(loser);  // unless make_room() preempted it
    count_passed(*sequence);
    take_slot(sequence);
  }
}

void Scheduler::resume(SequenceState& sequence) {
  kv_.resume(*sequence.kv, sequence.request->reusable(sequence), sequence.request->options.exact);
  for (const SequenceState* other : slots_)
    if (other && other != &sequence) share(sequence, *other);
}

// Returns how many first tokens of both are equal, of those whose KV this one can use.
int64_t Scheduler::shared_tokens(const SequenceState& sequence, const SequenceState& other) const {
  if (!kv_.prefix_reuse() || !(other.kv->root == sequence.kv->root)) return 0;
  const int64_t most = std::min(sequence.request->reusable(sequence), other.kv->length());
  if (most <= sequence.kv->written) return 0;
  const auto begin = sequence.kv->tokens.begin();
  return std::mismatch(begin, begin + most, other.kv->tokens.begin()).first - begin;
}

// Takes over the KV of the prefix that the running sequence `other` has computed, with the last
// page that is not full, which the prefix index does not have.
void Scheduler::share(SequenceState& sequence, const SequenceState& other) {
  if (sequence.fetching() || other.kv->foreign() > 0) return;
  const bool awaited = sequence.leader_slot >= 0 && sequence.leader_slot == other.slot &&
                       sequence.leader_arrival == other.request->arrival;
  const int64_t enough = sequence.kv->written + (awaited ? 1 : kLeastShared);
  if (other.kv->written < enough) return;
  const int64_t tokens = std::min(shared_tokens(sequence, other), other.kv->written);
  if (tokens >= enough) kv_.share(*sequence.kv, *other.kv, tokens);
}

// Shares what a sequence that leaves has computed with those that wait for it.
void Scheduler::hand_over(const SequenceState& leader) noexcept {
  for (SequenceState* sequence : waiting_) {
    if (sequence->leader_slot != leader.slot) continue;
    try {
      share(*sequence, leader);
    } catch (const std::bad_alloc&) {
      return;  // they find its full pages in the prefix index
    }
  }
}

// Handles sequences that have computed a hole up to pages that lower tiers have: each of them takes
// these pages over, or waits for them without a slot.
void Scheduler::cross_holes() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    SequenceState* sequence = slots_[i];
    if (!sequence || sequence->kv->written < sequence->hole_end()) continue;
    waiting_.insert(sequence);
    slots_[i] = nullptr;
    sequence->slot = -1;
    sequence->fetch->reach_hole_end(sequence->kv->written);
    resume(*sequence);
    if (set_aside(*sequence)) continue;
    waiting_.erase(sequence);
    slots_[i] = sequence;
    sequence->slot = static_cast<int>(i);
    count_crossed(*sequence);
  }
}

// Counts what was reused after a hole, as take_slot() counts what was reused at first.
void Scheduler::count_crossed(SequenceState& sequence) {
  if (!sequence.fetch) return;
  const int64_t from = sequence.fetch->take_crossing();
  const Sequence& kv = *sequence.kv;
  RequestState& request = *sequence.request;
  if (from >= kv.written || sequence.choice != 0 || kv.length() != request.prompt_tokens) return;
  const int64_t more = std::min(request.reused_tokens + kv.written - from, kv.written);
  const int64_t reused = std::max(request.reused_tokens, more);
  tokens_reused_ += reused - std::exchange(request.reused_tokens, reused);
  const int64_t loaded = std::min(reused, sequence.fetch->loaded_tokens());
  tokens_loaded_ += loaded - std::exchange(request.loaded_tokens, loaded);
  request.foreign_tokens = std::min(reused, kv.foreign());
}

// Returns whether no pages are being loaded for the waiting sequence and no running sequence is
// computing a prefix that it shares.
bool Scheduler::ready(const SequenceState& sequence) const {
  return !sequence.fetching() && !leader_of(sequence);
}

// Returns the waiting sequence that gets the next slot, or null. Among those of the best priority
// that is ready it is the one with the longest cached prefix, which could be evicted while others
// run, unless the first in rank has been passed often.
SequenceState* Scheduler::next_ready() {
  SequenceState* first = nullptr;
  SequenceState* best = nullptr;
  int64_t longest = 0, pages = kMostPagesCompared;
  int compared = 0;
  for (SequenceState* sequence : waiting_) {
    if (!ready(*sequence)) continue;
    if (!first) first = best = sequence;
    const int priority = sequence->request->options.priority;
    if (waiting_.size() == 1 || first->passed >= kMostPassed || pages <= 0 ||
        ++compared > kMostCompared || priority != first->request->options.priority)
      break;
    const int64_t cached = cached_pages(*sequence, pages);
    if (cached > longest) best = sequence;
    longest = std::max(longest, cached);
    pages -= cached;
  }
  return best;
}

// Returns how many first pages of the sequence have KV on the device, at most `most`.
int64_t Scheduler::cached_pages(SequenceState& sequence, int64_t most) {
  Sequence& seq = *sequence.kv;
  int64_t pages = seq.written / kPageTokens;
  if (!kv_.prefix_reuse() || pages >= most) return std::min(pages, most);
  const int64_t reusable = sequence.request->reusable(sequence) / kPageTokens;
  return std::max(pages,
                  kv_.longest_hit(seq, std::min(reusable, most), sequence.request->options.exact));
}

// Counts, for sequences of equal priority that rank before this one, that it gets its slot first.
void Scheduler::count_passed(const SequenceState& sequence) {
  for (SequenceState* other : waiting_) {
    if (other == &sequence) return;
    if (other->request->options.priority == sequence.request->options.priority && ready(*other))
      ++other->passed;
  }
}

// Returns the running sequence that computes a prefix for this waiting one, or null: it has
// computed the prefix, or lost its slot.
const SequenceState* Scheduler::leader_of(const SequenceState& sequence) const {
  if (sequence.leader_slot < 0) return nullptr;
  const SequenceState* leader = slots_[sequence.leader_slot];
  if (!leader || leader->request->arrival != sequence.leader_arrival) return nullptr;
  return leader->kv->written < sequence.awaited ? leader : nullptr;
}

// Looks for a running sequence that is about to compute more of the prefix of this one than it has.
// If there is one, this one waits until then, so that each page is computed once.
bool Scheduler::find_leader(SequenceState& sequence) {
  sequence.leader_slot = -1;
  if (!kv_.prefix_reuse()) return false;
  const RequestState& request = *sequence.request;
  sequence.awaited = sequence.kv->written;
  for (SequenceState* other : slots_) {
    if (!other || other->kv->pending() <= 1) continue;
    if (other->request->options.priority > request.options.priority) continue;
    if (request.options.exact && other->kv->foreign() > 0) continue;
    const int64_t shared = shared_tokens(sequence, *other);
    const int64_t now = std::max(sequence.awaited, other->kv->written), more = shared - now;
    const bool most = more > 0 && 2 * more >= sequence.kv->length() - now;
    if (more < kLeastAwaited && !most) continue;
    sequence.awaited = shared;
    sequence.leader_slot = other->slot;
    sequence.leader_arrival = other->request->arrival;
  }
  if (sequence.leader_slot < 0) return false;
  if (!std::exchange(sequence.counted_awaiting, true)) ++prefixes_awaited_;
  return true;
}

// Finds, per slot, the token up to which a waiting sequence shares what is being computed there.
void Scheduler::find_awaited() {
  std::fill(awaited_.begin(), awaited_.end(), kNoToken);
  for (const SequenceState* sequence : waiting_)
    if (leader_of(*sequence)) {
      int64_t& first = awaited_[sequence->leader_slot];
      first = std::min(first, sequence->awaited);
    }
}

// Returns whether the step in flight computes the rest of a prefix that a sequence waits for.
bool Scheduler::completes_awaited(const StepPlan& before) const {
  for (const PlannedSequence& planned : before.sequences)
    if (planned.sequence && planned.sequence->slot >= 0 &&
        planned.begin + planned.tokens >= awaited_[planned.sequence->slot])
      return true;
  return false;
}

// Returns true when pages of the sequence are being loaded from a lower tier. Other sequences pass
// it meanwhile, and running ones release nothing for it.
bool Scheduler::set_aside(SequenceState& sequence) {
  if (!sequence.fetch) return false;
  const auto count_promised = [this] {
    promised_.assign(kv_.groups(), 0);
    add_promised(promised_);
  };
  const auto make_room = [&] {
    if (!reclaim_idle(sequence)) return false;
    count_promised();
    return true;
  };
  count_promised();
  return tiers_->fetch(*sequence.fetch, sequence.request->reusable(sequence), compute_cost(),
                       promised_, make_room) == FetchResult::waiting;
}

void Scheduler::take_slot(SequenceState* sequence) {
  const auto slot = std::find(slots_.begin(), slots_.end(), nullptr);
  waiting_.erase(sequence);
  sequence->slot = static_cast<int>(slot - slots_.begin());
  *slot = sequence;
  const FetchState* fetch = sequence->fetch;
  if (fetch) sequence->fetch->begin_slot();
  if (std::exchange(sequence->admitted, true)) return count_crossed(*sequence);
  if (sequence->choice != 0) return;  // it shares what the first choice computed
  const int64_t written = sequence->kv->written;
  count_start(*sequence->request);
  sequence->computed_from = fetch ? std::min(written, fetch->first_loaded()) : written;
  RequestState& request = *sequence->request;
  request.reused_tokens = written;
  request.loaded_tokens = fetch ? std::min(written, fetch->loaded_tokens()) : 0;
  request.foreign_tokens = sequence->kv->foreign();
  tokens_reused_ += written;
  tokens_loaded_ += request.loaded_tokens;
}

void Scheduler::count_start(const RequestState& request) {
  const auto waited = std::chrono::steady_clock::now() - request.submitted;
  queue_seconds_ += std::chrono::duration<double>(waited).count();
  ++requests_started_;
  prompt_tokens_ += request.prompt_tokens;
}

// Returns the last sequence in rank with a slot if its priority is worse, else null.
SequenceState* Scheduler::outranked_by(const SequenceState& sequence) const {
  SequenceState* last = *std::max_element(slots_.begin(), slots_.end(), ByRank{});
  return last->request->options.priority > sequence.request->options.priority ? last : nullptr;
}

void Scheduler::add_promised(std::vector<int64_t>& promised) const {
  for (const SequenceState* sequence : slots_)
    if (sequence) kv_.add_outstanding(*sequence->kv, promised);
}

bool Scheduler::make_room(const SequenceState& sequence) {
  for (;;) {
    promised_.assign(kv_.groups(), 0);
    add_promised(promised_);
    if (kv_.can_hold(*sequence.kv, promised_)) return true;
    if (!reclaim(sequence)) return false;
  }
}

// Makes room for the growth that is expected of the sequence and of running ones whose priority is
// not worse, which could otherwise preempt it soon. Running sequences release nothing for it now;
// those of worse priority do once it grows.
bool Scheduler::make_growth_room(const SequenceState& sequence) {
  double growth = expected_growth_;
  for (int i = 0; i < sequence.preemptions; ++i) growth *= kMoreRoom;
  const auto add = [&](const SequenceState& other) {
    const RequestState& request = *other.request;
    const int64_t rest = request.generates() ? request.limit - other.kv->length() : 0;
    const double most = std::min(growth, static_cast<double>(rest));
    kv_.add_outstanding(*other.kv, promised_, static_cast<int64_t>(most));
  };
  for (;;) {
    promised_.assign(kv_.groups(), 0);
    for (const SequenceState* other : slots_)
      if (other && other->request->options.priority <= sequence.request->options.priority)
        add(*other);
    if (promised_ == std::vector<int64_t>(kv_.groups(), 0)) return true;
    add(sequence);
    if (kv_.has_available(promised_)) return true;
    if (!reclaim_idle(sequence)) break;
  }
  return std::any_of(slots_.begin(), slots_.end(), [&](const SequenceState* other) {
    return other && other->request->options.priority > sequence.request->options.priority;
  });
}

// Releases the pages of one more holder: an idle handle, a sequence without a slot, or one with a
// slot that ranks after the beneficiary.
bool Scheduler::reclaim(const SequenceState& beneficiary) {
  if (reclaim_idle(beneficiary)) return true;
  SequenceState* last = nullptr;
  for (SequenceState* sequence : slots_)
    if (sequence && ranks_before(beneficiary, *sequence) &&
        (!last || ranks_before(*last, *sequence)))
      last = sequence;
  if (!last) return false;
  preempt(last);
  return true;
}

// The same, of holders without a slot.
bool Scheduler::reclaim_idle(const SequenceState& beneficiary) {
  if (park_idle_()) return true;
  if (tiers_ && tiers_->release_idle()) return true;
  for (auto it = waiting_.rbegin(); it != waiting_.rend(); ++it) {
    SequenceState& sequence = **it;
    if (&sequence == &beneficiary) continue;
    if (sequence.fetching()) {
      if (!ranks_before(beneficiary, sequence)) continue;
      tiers_->cancel(*sequence.kv);
      return true;
    }
    if (!kv_.holds_pages(*sequence.kv)) continue;
    drop_pages(sequence);
    return true;
  }
  return false;
}

void Scheduler::preempt(SequenceState* sequence) {
  release_slot(sequence);
  drop_pages(*sequence);
  ++sequence->preemptions;
}

// Releases the pages of a sequence without a slot. They stay cached until others need them, and the
// host tier, if there is one, gets a copy.
void Scheduler::drop_pages(SequenceState& sequence) {
  sequence.computed_to = std::max(sequence.computed_to, sequence.kv->written);
  if (tiers_) tiers_->offload(*sequence.kv);
  kv_.drop_pages(*sequence.kv);
}

// The sequence holds its pages until another one needs them.
void Scheduler::release_slot(SequenceState* sequence) {
  waiting_.insert(sequence);
  slots_[sequence->slot] = nullptr;
  sequence->slot = -1;
  if (sequence->fetch) sequence->fetch->end_slot();
  ++preemptions_;
}

}  // namespace turbomind
