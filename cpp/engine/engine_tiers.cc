// The part of EngineCore that uses the lower tiers.
#include <algorithm>

#include "core/error.h"
#include "engine/engine_core.h"

namespace turbomind {

void EngineCore::save(HandleId handle) {
  Sequence& seq = find(handle).seq;
  if (tiers_ && seq.persist) tiers_->save(seq);
}

void EngineCore::warm(HandleId handle) {
  Handle& h = find(handle);
  if (!tiers_ || h.request) return;
  std::vector<int64_t> promised(kv_.groups(), 0);
  scheduler_.add_promised(promised);
  list_idle(handle, h);  // it may hold pages from now on
  tiers_->prefetch(h.seq, scheduler_.compute_cost(), promised);
}

void EngineCore::flush(std::shared_ptr<Flush> flush) {
  if (tiers_) {
    tiers_->flush(std::move(flush));
  } else {
    flush->finish(true);
  }
}

void EngineCore::remove_pages(const std::vector<BlockHash>& keys) {
  if (tiers_) tiers_->remove(keys);
  kv_.forget(keys);
}

Sequence EngineCore::sequence_of(const std::vector<int32_t>& token_ids, int adapter,
                                 const std::string& salt) const {
  Sequence seq = kv_.make_sequence(adapter, salt, 0);
  seq.tokens = token_ids;
  return seq;
}

// Returns how many first tokens of `seq` one open handle has KV of, at most.
int64_t EngineCore::longest_held(const Sequence& seq) const {
  int64_t most = 0;
  for (const auto& [id, h] : handles_) {
    if (!(h.seq.root == seq.root)) continue;
    const int64_t known = std::min(h.seq.written, seq.length());
    // Most handles share no more than a common system prompt: one comparison excludes them.
    if (known <= most || h.seq.tokens[most] != seq.tokens[most]) continue;
    const auto end = h.seq.tokens.begin() + known;
    const auto same = std::mismatch(h.seq.tokens.begin(), end, seq.tokens.begin()).first;
    most = std::max<int64_t>(most, same - h.seq.tokens.begin());
  }
  return most;
}

Residence EngineCore::residence(const std::vector<int32_t>& token_ids, int adapter,
                                const std::string& salt) {
  Sequence seq = sequence_of(token_ids, adapter, salt);
  Residence where;
  if (tiers_) where = tiers_->residence(seq);
  if (!tiers_ && kv_.prefix_reuse())
    where.device = kPageTokens * kv_.longest_hit(seq, seq.length() / kPageTokens, false);
  where.device = std::max(where.device, longest_held(seq));
  for (int64_t& tokens : where.tiers) tokens = std::max(tokens, where.device);
  return where;
}

Forecast EngineCore::forecast(const std::vector<int32_t>& token_ids, int64_t added, int adapter,
                              const std::string& salt) {
  Forecast found{residence(token_ids, adapter, salt)};
  const ComputeCost compute = scheduler_.compute_cost();
  if (tiers_) {
    Sequence seq = sequence_of(token_ids, adapter, salt);
    found.ttft = tiers_->predict_ttft(seq, found.where.device, added, compute);
    return found;
  }
  const int64_t length = static_cast<int64_t>(token_ids.size()) + added;
  found.ttft = compute.seconds(std::min(found.where.device, length - 1), length);
  return found;
}

LastSaves EngineCore::finish_saves(double seconds) noexcept {
  if (!tiers_) return {};
  for (auto& [id, h] : handles_) try {
      if (h.seq.persist) tiers_->save(h.seq);
    } catch (const std::exception&) {  // out of memory: it is computed again
    }
  try {
    if (unrecorded_steps_ > 0) record_speeds();
  } catch (const std::exception&) {  // out of memory: the next engine measures
  }
  return tiers_->finish(seconds);
}

}  // namespace turbomind
