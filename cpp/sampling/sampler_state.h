// Contents of SamplerState and the processors that edit a row of logits. For sampler.cc only.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/sampler.h"

namespace turbomind {

// Tokens seen so far with the number of times each was produced: dense entries, found by hash.
// Memory grows with the distinct tokens of the sequence, not with the vocabulary.
class TokenCounts {
 public:
  struct Entry {
    int32_t id = 0;
    int32_t produced = 0;
  };
  // Returns the entry of a token, added when missing.
  Entry& at(int32_t id);
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  void grow();
  size_t place_of(int32_t id) const;

  std::vector<Entry> entries_;
  std::vector<int32_t> table_;  // power of two, at most half full; index into entries_, or -1
};

struct SamplerState::Impl {
  std::shared_ptr<const SamplingParams> params;
  int choice = 0;
  int64_t produced = 0;
  bool repetition = false;      // penalty over prompt and output is on
  bool output_penalty = false;  // presence or frequency is on
  TokenCounts counts;           // filled when either is on
  std::vector<int32_t> stops;   // sorted; stop ids, and eos ids unless ignored
  std::vector<int32_t> tail;    // last tokens, as many as the longest bad word can look back
  size_t tail_size = 0;

  bool edits() const;                          // returns whether apply() changes the row
  void apply(float* logits, int vocab) const;  // runs every processor before temperature
  void push_tail(int32_t token);

 private:
  void apply_penalties(float* logits, int vocab) const;
  void apply_bad_words(float* logits, int vocab) const;
};

}  // namespace turbomind
