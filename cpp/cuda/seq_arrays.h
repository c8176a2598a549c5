// The sequences of a step as kernels see them: arrays in device memory that are rewritten between
// steps at fixed addresses, so that captured graphs survive.
#pragma once

#include <cstdint>

namespace turbomind {

// One cache group's view; the fields mean what AttentionSeq's do (ops/attention.h). Sequences of
// q_len 0 are padding of the batch bucket: nothing of theirs is read or written.
struct SeqArrays {
  const int32_t* q_begin;       // [num_seqs]
  const int32_t* q_len;         // [num_seqs]
  const int32_t* kv_begin;      // [num_seqs]
  const int32_t* pages;         // [num_seqs][max_pages]; -1: out of the window's reach
  const int32_t* seq_of_token;  // [tokens]
  int num_seqs;
  int max_pages;
  int tokens;
};

}  // namespace turbomind
