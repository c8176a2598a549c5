// The engine's view of a model: steps of token ids in, logits out. No device appears here; pages
// are cache/page_io.h and results of asynchronous steps model/step_outputs.h. The decoder
// (model/decoder/decoder.h) implements it; engine tests use a scripted model.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "cache/kv_layout.h"
#include "cache/page_io.h"
#include "core/context.h"
#include "model/model_memory.h"
#include "model/step_outputs.h"

namespace turbomind {

// One resident sequence's share of a step.
struct StepRow {
  int64_t q_begin = 0;  // first row of the step's token arrays
  int64_t q_len = 0;
  int64_t kv_begin = 0;               // tokens of the sequence whose KV is already written
  int adapter = 0;                    // adapter slot; 0: none
  std::vector<const int32_t*> pages;  // per cache group; see AttentionSeq::pages
};

// Arrays stay alive and unchanged until forward() returns.
struct StepBatch {
  std::vector<int32_t> token_ids;  // [tokens]
  std::vector<int32_t> positions;  // [tokens]; not assumed equal to the index in the sequence
  // [tokens] index of a token of the last submit_sample(), which replaces token_ids; -1 where
  // token_ids is final. Empty: all are final.
  std::vector<int32_t> token_from;
  std::vector<StepRow> rows;
  std::vector<int32_t> sample_rows;  // token rows whose logits are wanted, ascending
};

// A model checks it between two layers and stops the step once one of the flags is set. The engine
// lists the requests that prefill in the step.
struct StepCancel {
  std::vector<const std::atomic<bool>*> flags;
  bool requested() const {
    for (const auto* flag : flags)
      if (flag->load(std::memory_order_relaxed)) return true;
    return false;
  }
};

// The largest step that the engine submits.
struct StepLimits {
  int64_t tokens = 0;
  int64_t rows = 0;     // sequences
  int64_t samples = 0;  // rows whose logits are wanted
  int64_t keys = 0;     // of one sequence, the step's own included
  int64_t sampled = 0;  // tokens of one submit_sample(); at least `rows`
};

// Result of a warm-up.
struct WarmUp {
  int done = 0;  // kinds of steps that were run
  int of = 0;    // kinds that there are; 0: nothing to warm up
  double seconds = 0;
};

// Calls are made by one thread, except calls of pages() whose comments allow any thread.
class Model {
 public:
  virtual ~Model() = default;

  // ---- Description. It stays valid after release().
  virtual int vocab() const = 0;
  virtual int max_context() const = 0;                 // tokens
  virtual const std::string& fingerprint() const = 0;  // of weights and config; seeds block hashes
  virtual const std::vector<CacheGroup>& groups() const = 0;
  virtual const ModelMemory& memory() const = 0;  // by rank
  // Fingerprint of the arithmetic: backend, instruction set and revision of the kernels, such as
  // "cpu/avx512_bf16/1". Models with equal fingerprints and weights compute the same bits.
  virtual const std::string& numerics_fingerprint() const = 0;
  virtual Context& context() = 0;
  // Of each rank; their profilers change between steps only.
  virtual std::vector<Context*> contexts() { return {&context()}; }

  // ---- Memory.
  // Allocates the work memory of any step within `most`, so that no step allocates. Called once,
  // before pages().allocate_pages(). Without it, and on the CPU, work memory grows with the steps.
  // Throws Error(invalid_request) for steps that the device cannot run.
  virtual void reserve(const StepLimits&) {}
  // Returns how many bytes of the device are free for pages, of all ranks together, which need
  // equal parts; 0 on the CPU, which shares its memory.
  virtual int64_t free_bytes() const { return 0; }
  virtual PageIo& pages() = 0;
  const PageIo& pages() const { return const_cast<Model*>(this)->pages(); }
  // Frees what device memory the model has. No step follows, and no page is used again. On the CPU
  // memory is freed with the model.
  virtual void release() noexcept {}

  // ---- Steps.
  // Runs steps of every kind for at most about `seconds`, so that no request waits for what only
  // first steps need (kernels being loaded, graphs being captured). Called once, after
  // allocate_pages(); pages lose their contents. Throws what a step throws.
  virtual WarmUp warm_up(const StepLimits&, double) { return {}; }
  // Runs one step. `logits` [sample_rows, vocab] float32, owned by the caller. Returns false when
  // `cancel` (may be null) was requested between two layers: the step then counts as not run. KV of
  // the step's tokens may be written to its pages either way.
  //
  // A page is handed out with the contents of its last owner, and a sequence writes its slots in
  // order from the first. Old contents of a slot must not reach a result, not even as a NaN times a
  // weight of zero.
  //
  // With outputs(), `logits` may be null: the call then does not wait, and the logits stay with the
  // model until the next forward(). A next step may be submitted before the tokens of this one are
  // read.
  virtual bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) = 0;
  // Returns the results of asynchronous steps; null when forward() always waits.
  virtual StepOutputs* outputs() { return nullptr; }
};

}  // namespace turbomind
