// A model without arithmetic: its KV is the tokens themselves, its logits are a hash of every key
// that a query reads. A page that is wrong, stale, shared by mistake or missing leads to an error
// or to other tokens.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "model/model.h"

namespace turbomind::scripted {

struct Options {
  int vocab = 61;
  int max_context = 450;
  std::vector<int> windows = {0};  // per cache group; 0: full attention
  int layers = 0;                  // `cancel` is checked after each
  int layer_us = 0;                // sleep per layer
  int32_t poison = -1;             // a sequence with this token has NaN logits
  int32_t bomb = -1;               // a step that computes it throws
  std::string numerics = "scripted/1";
  int page_batch = 1;  // above 1: host memory in slabs that are no multiple of a page
  // For AsyncModel: it samples tokens itself, and fails this often per thousand calls.
  bool asynchronous = false;
  int fail_submit = 0;
  int fail_wait = 0;
};

inline uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9E3779B97F4A7C15u + b + 0x632BE59BD9B4E019u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The KV of one token. `chain` depends on every token before it, as the KV of a real model does;
// its lowest bit is set after the poison token.
struct Slot {
  int32_t token = 0;
  int32_t position = 0;
  uint64_t chain = 0;
};

inline uint64_t next_chain(const Options& o, uint64_t chain, int32_t token, int64_t position) {
  const uint64_t h = mix(mix(chain, static_cast<uint64_t>(token)), static_cast<uint64_t>(position));
  return (h & ~uint64_t{1}) | (chain & 1) | (token == o.poison ? 1 : 0);
}

// A window of one key has no predecessor to chain to.
inline uint64_t first_chain(const Options& o, int window, const Slot* before, int32_t token,
                            int64_t position) {
  return next_chain(o, before && window != 1 ? before->chain : 6, token, position);
}

inline int64_t first_key(int window, int64_t index) {
  return window > 0 ? std::max<int64_t>(0, index - window + 1) : 0;
}

// Computes one row of logits from what a query reads: per group the chains of its keys, folded in
// order.
inline void logits_of(const Options& o, const std::vector<uint64_t>& folds, bool poisoned,
                      float* logits) {
  uint64_t h = 11;
  for (uint64_t fold : folds) h = mix(h, fold);
  for (int v = 0; v < o.vocab; ++v) {
    const uint64_t bits = mix(h, static_cast<uint64_t>(v)) >> 40;  // 24 bits
    logits[v] = static_cast<float>(bits) / (1 << 20) - 8;
    if (poisoned) logits[v] = std::numeric_limits<float>::quiet_NaN();
  }
}

// Samples as a device does, by definition: the likeliest tokens first, without those that top-k,
// top-p and min-p cut, then in the order of ids. Returns -1 for a row that is not finite.
inline int32_t sample_token(const float* logits, int vocab, const SampleRow& row) {
  std::vector<int32_t> ids(vocab);
  std::iota(ids.begin(), ids.end(), 0);
  for (int32_t id : ids)
    if (!std::isfinite(logits[id])) return -1;  // the rule bans no token
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (row.temperature == 0 || row.top_k == 1) return ids[0];
  const auto weight = [&](int32_t id) {
    return std::exp((static_cast<double>(logits[id]) - logits[ids[0]]) / row.temperature);
  };
  if (row.top_k > 0 && row.top_k < vocab) ids.resize(row.top_k);
  double total = 0, mass = 0;
  for (int32_t id : ids) total += weight(id);
  size_t chosen = 0;
  while (chosen < ids.size() && (chosen == 0 || mass < row.top_p * total))
    mass += weight(ids[chosen++]);
  std::vector<double> weights(vocab, 0.0);
  double left = 0;
  for (size_t i = 0; i < chosen; ++i)
    if (weight(ids[i]) >= row.min_p) left += weights[ids[i]] = weight(ids[i]);
  double target = left * static_cast<double>(row.uniform) * 0x1p-53;
  int32_t last = -1;
  for (int32_t id = 0; id < vocab && target >= 0; ++id)
    if (weights[id] > 0) target -= weights[last = id];
  return last;
}

// Returns the log-probability of the token, then those of the `top` likeliest ones.
inline std::vector<Logprob> logprobs_of(const float* logits, int vocab, int32_t token, int top) {
  std::vector<int32_t> ids(vocab);
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  double sum = 0;
  for (int32_t id : ids) sum += std::exp(static_cast<double>(logits[id]));
  ids.resize(top);
  ids.insert(ids.begin(), token);
  std::vector<Logprob> out;
  for (int32_t id : ids) out.push_back({id, static_cast<float>(logits[id] - std::log(sum))});
  return out;
}

// Applies the same rule to a plain token vector and returns the logits at `index`.
class Rule {
 public:
  explicit Rule(Options options) : options_(std::move(options)) {}
  const Options& options() const { return options_; }

  void logits(const std::vector<int32_t>& tokens, int64_t index, float* out) const {
    std::vector<uint64_t> folds;
    bool poisoned = false;
    for (int window : options_.windows) {
      uint64_t fold = 3;
      Slot slot;
      for (int64_t j = 0; j <= index; ++j) {
        slot.chain = first_chain(options_, window, j > 0 ? &slot : nullptr, tokens[j], j);
        if (j >= first_key(window, index)) {
          fold = mix(fold, slot.chain);
          poisoned = poisoned || (slot.chain & 1);
        }
      }
      folds.push_back(fold);
    }
    logits_of(options_, folds, poisoned, out);
  }

 private:
  Options options_;
};

class ScriptedModel : public Model, public PageIo {
 public:
  explicit ScriptedModel(Options options)
      : options_(std::move(options)), pool_(1), context_{pool_, Isa::portable, profiler_} {
    for (int window : options_.windows) {
      CacheGroup group;
      group.kind = window > 0 ? CacheKind::window : CacheKind::full;
      group.window = window;
      group.page_bytes = kPageTokens * sizeof(Slot);
      bytes_.ranks[0].page_bytes.push_back(group.page_bytes);
      groups_.push_back(group);
    }
  }

  int vocab() const override { return options_.vocab; }
  int max_context() const override { return options_.max_context; }
  const std::string& fingerprint() const override { return fingerprint_; }
  const std::vector<CacheGroup>& groups() const override { return groups_; }
  const ModelMemory& memory() const override { return bytes_; }
  Context& context() override { return context_; }
  PageIo& pages() override { return *this; }

  void allocate_pages(const std::vector<int64_t>& pages) override {
    for (const int64_t count : pages) {  // pages start as garbage
      memory_.emplace_back(count * kPageTokens, Slot{-7, -7, 6});
      writer_.emplace_back(count, -1);
    }
  }
  void copy_page(int group, int32_t src, int32_t dst) override {
    std::copy_n(slots(group, src), kPageTokens, slots(group, dst));
  }

  const std::string& numerics_fingerprint() const override { return options_.numerics; }
  size_t stored_page_bytes(int, int count) const override { return count * sizeof(Slot); }
  void read_page(int group, int32_t page, int count, uint8_t* out) const override {
    std::memcpy(out, memory_[group].data() + int64_t{page} * kPageTokens, count * sizeof(Slot));
  }
  using PageIo::write_page;
  void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) override {
    expect(count >= 1 && count <= stored && stored <= kPageTokens, "a page's tokens");
    std::fill_n(slots(group, page), kPageTokens, Slot{-9, -9, 2});  // garbage after `count`
    std::memcpy(slots(group, page), in, count * sizeof(Slot));
  }

  int page_batch() const override { return options_.page_batch; }
  HostMemory host_memory() const override {
    HostMemory memory = plain_memory();
    if (options_.page_batch > 1) memory.slab_bytes = 5 * kPageTokens * sizeof(Slot) / 2;
    return memory;
  }

  bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) override {
    for (int32_t token : batch.token_ids)
      if (token == options_.bomb) throw Error(ErrorCode::internal, "bomb");
    for (auto& pages : writer_) std::fill(pages.begin(), pages.end(), -1);
    for (size_t r = 0; r < batch.rows.size(); ++r) claim(batch.rows[r], static_cast<int>(r));
    for (int layer = 0; layer < options_.layers; ++layer) {
      if (options_.layer_us > 0)
        std::this_thread::sleep_for(std::chrono::microseconds(options_.layer_us));
      if (cancel && cancel->requested()) {
        scribble(batch);
        return false;
      }
    }
    size_t sample = 0;
    for (size_t r = 0; r < batch.rows.size(); ++r)
      compute(batch, static_cast<int>(r), sample, logits);
    expect(sample == batch.sample_rows.size(), "rows to sample in ascending order");
    return true;
  }

 protected:
  const Options& options() const { return options_; }
  static void expect(bool ok, const char* what) {
    if (!ok) throw Error(ErrorCode::internal, std::string("scripted model: expected ") + what);
  }

 private:
  Slot* slots(int group, int32_t page) {
    return memory_[group].data() + int64_t{page} * kPageTokens;
  }

  Slot& slot(const StepRow& row, int group, int64_t index) {
    const int32_t page = row.pages[group][index / kPageTokens];
    expect(page >= 0 && page < static_cast<int32_t>(writer_[group].size()), "a page within reach");
    return slots(group, page)[index % kPageTokens];
  }

  // Checks that no two sequences write the same page.
  void claim(const StepRow& row, int r) {
    for (size_t g = 0; g < groups_.size(); ++g)
      for (int64_t i = row.kv_begin; i < row.kv_begin + row.q_len; ++i) {
        slot(row, static_cast<int>(g), i);
        int& writer = writer_[g][row.pages[g][i / kPageTokens]];
        expect(writer == -1 || writer == r, "pages to be written by one sequence only");
        writer = r;
      }
  }

  // A cancelled step may leave anything after the written tokens.
  void scribble(const StepBatch& batch) {
    for (const StepRow& row : batch.rows)
      for (size_t g = 0; g < groups_.size(); ++g)
        for (int64_t i = 0; i < row.q_len; ++i)
          slot(row, static_cast<int>(g), row.kv_begin + i) = Slot{-5, -5, 4};
  }

  // Reads and verifies one key: it must follow from its predecessor if that is within the window.
  uint64_t read(const StepRow& row, int r, int group, int64_t index, int64_t first) {
    const int window = groups_[group].window;
    const Slot& s = slot(row, group, index);
    const int writer = writer_[group][row.pages[group][index / kPageTokens]];
    expect(writer == -1 || writer == r, "no other sequence to write a page that is read");
    expect(s.position == index, "the position of a key to be its index");
    if (index == 0 || index > first || window == 1) {
      const Slot* before = index > 0 && window != 1 ? &slot(row, group, index - 1) : nullptr;
      expect(s.chain == first_chain(options_, window, before, s.token, index),
             "a key that follows from the one before");
    }
    return s.chain;
  }

  void compute(const StepBatch& batch, int r, size_t& sample, float* logits) {
    const StepRow& row = batch.rows[r];
    const size_t groups = groups_.size();
    std::vector<uint64_t> fold(groups, 3);  // of full groups, carried from token to token
    std::vector<char> poison(groups, 0);
    for (size_t g = 0; g < groups; ++g)
      for (int64_t j = 0; groups_[g].window == 0 && j < row.kv_begin; ++j)
        add_key(row, r, static_cast<int>(g), j, 0, fold[g], poison[g]);
    for (int64_t i = 0; i < row.q_len; ++i) {
      const int64_t index = row.kv_begin + i, t = row.q_begin + i;
      expect(batch.positions[t] == index, "positions equal to indices");
      for (size_t g = 0; g < groups; ++g) {
        const int group = static_cast<int>(g), window = groups_[g].window;
        write(row, group, index, batch.token_ids[t]);
        if (window > 0) fold[g] = 3, poison[g] = 0;
        const int64_t first = window > 0 ? first_key(window, index) : index;
        for (int64_t j = first; j <= index; ++j)
          add_key(row, r, group, j, window > 0 ? first : 0, fold[g], poison[g]);
      }
      if (sample >= batch.sample_rows.size() || batch.sample_rows[sample] != t) continue;
      bool poisoned = false;
      for (char p : poison) poisoned = poisoned || p;
      logits_of(options_, fold, poisoned, logits + sample++ * options_.vocab);
    }
  }

  void write(const StepRow& row, int group, int64_t index, int32_t token) {
    const int window = groups_[group].window;
    const Slot* before = index > 0 && window != 1 ? &slot(row, group, index - 1) : nullptr;
    slot(row, group, index) = {token, static_cast<int32_t>(index),
                               first_chain(options_, window, before, token, index)};
  }

  void add_key(const StepRow& row, int r, int group, int64_t index, int64_t first, uint64_t& fold,
               char& poison) {
    const uint64_t chain = read(row, r, group, index, first);
    fold = mix(fold, chain);
    poison = poison || (chain & 1);
  }

  Options options_;
  ThreadPool pool_;
  Profiler profiler_;
  Context context_;
  std::string fingerprint_ = "scripted";
  std::vector<CacheGroup> groups_;
  ModelMemory bytes_ = {0, {{}}};
  std::vector<std::vector<Slot>> memory_;  // [group][page * kPageTokens + slot]
  std::vector<std::vector<int>> writer_;   // [group][page] sequence of this step, or -1
};

}  // namespace turbomind::scripted
