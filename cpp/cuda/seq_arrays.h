// The sequences of a step as kernels read them: arrays in device memory that are rewritten between
// steps at fixed addresses, so that captured graphs stay valid.
#pragma once

#include <cstdint>

namespace turbomind {

// One cache group's view; the fields mean what AttentionSeq's do (ops/attention.h). Sequences of
// q_len 0 are padding of the batch bucket: kernels read and write nothing of them.
struct SeqArrays {
  const int32_t* q_begin;       // [num_seqs]
  const int32_t* q_len;         // [num_seqs]
  const int32_t* kv_begin;      // [num_seqs]
  const int32_t* pages;         // [num_seqs][max_pages]; -1: outside the window
  const int32_t* seq_of_token;  // [tokens]
  int num_seqs;
  int max_pages;
  int tokens;
};

}  // namespace turbomind
