// The kernels of ops/sample.h on a GPU.
#pragma once

#include <cstdint>

#include "cuda/types.h"
#include "ops/sample.h"

namespace turbomind {

// The passes that some row of a launch needs; the others are skipped.
struct SampleNeeds {
  bool pick = false;  // a token other than the likeliest may be sampled
  bool top_k = false;
  bool top_p = false;
};
constexpr SampleNeeds sample_needs(const SampleRow* rows, int64_t count) {
  SampleNeeds needs;
  for (const SampleRow* r = rows; r < rows + count; ++r) {
    if (r->logits_row < 0 || r->temperature == 0 || r->top_k == 1) continue;
    needs.pick = true;
    needs.top_k |= r->top_k > 0;
    needs.top_p |= r->top_p < 1;
  }
  return needs;
}

// The parts of a row, in order of ids; a block takes one or several of them.
constexpr int kSampleParts = 32;
constexpr int kSampleBins = 2048;

// State that the passes over one row share, in device memory. Zeros before the first launch.
struct SampleScratch {
  uint64_t bins[kSampleBins];          // zeros between launches
  uint64_t part_keys[kSampleParts];    // the best of a block; mass of a part
  uint32_t part_counts[kSampleParts];  // finite logits of a block; ties of a part
  uint32_t part_bad[kSampleParts];     // blocks: whether a logit was NaN or +inf
  uint64_t wanted;                     // what is left of the mass or the count that is searched
  uint32_t prefix;                     // bits of the key found so far
  uint32_t max_key;                    // of the likeliest token; 0: the row's token is stored
  uint32_t finite;                     // logits
  uint32_t cut, ties;  // tokens that stay: keys above `cut`, the first `ties` equal ones
  uint32_t tied;       // tokens of key `cut`, where a top-k found it
  uint32_t arrived;    // blocks; zero between launches
};

struct DeviceSampling {
  const float* logits = nullptr;  // [rows][stride] float32
  int64_t stride = 0;             // elements, a multiple of 4; logits are 16-byte aligned
  int32_t vocab = 0;              // at most kMaxSampledVocab
  int32_t num_rows = 0;
  const SampleRow* rows = nullptr;  // device memory
  // Device memory, out: the token, or -1 for a row with a NaN or +inf or without any finite logit.
  int32_t* tokens = nullptr;
  SampleScratch* scratch = nullptr;  // [num_rows], device memory
  // Blocks that share a row: a power of two up to kSampleParts. It changes no token.
  int32_t spread = 1;
  SampleNeeds needs{true, true, true};  // at least those of the rows
};

// Returns the number of blocks that share a row: as many as run at once, of at least about 4096
// logits each.
constexpr int32_t sample_spread(int64_t rows, int64_t vocab, int multiprocessors) {
  int32_t spread = 1;
  while (spread < kSampleParts && 2 * spread * rows <= multiprocessors && 4096 * spread < vocab)
    spread *= 2;
  return spread;
}

constexpr int32_t kMaxSampledVocab = 1 << 20;

struct SampleCuda {
  // Throws Error(internal) for a spread or a vocabulary out of range.
  void (*sample)(StreamHandle stream, const DeviceSampling& sampling);
};

namespace cuda_emulated {
extern const SampleCuda kSampleCuda;
}
namespace cuda {
extern const SampleCuda kSampleCuda;  // where nvcc was there
}

}  // namespace turbomind
