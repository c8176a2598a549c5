// The engine's view of a model: pages in, token ids in, logits out. The decoder implements it;
// engine tests use a scripted one.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "cache/kv_layout.h"
#include "cache/page_transfer.h"
#include "core/context.h"
#include "core/memory.h"
#include "ops/logprobs_cuda.h"
#include "ops/sample_cuda.h"

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
  // [tokens] -1, or which one of the last submit_sample()'s tokens it is, whatever token_ids says.
  // Empty: all are known.
  std::vector<int32_t> token_from;
  std::vector<StepRow> rows;
  std::vector<int32_t> sample_rows;  // token rows whose logits are wanted, ascending
};

// Looked at between two layers: true once any request that wants the step's tokens to stop was
// cancelled. The engine lists the requests that prefill in the step.
struct StepCancel {
  std::vector<const std::atomic<bool>*> flags;
  bool requested() const {
    for (const auto* flag : flags)
      if (flag->load(std::memory_order_relaxed)) return true;
    return false;
  }
};

// What a step has at most.
struct StepLimits {
  int64_t tokens = 0;
  int64_t rows = 0;     // sequences
  int64_t samples = 0;  // rows whose logits are wanted
  int64_t keys = 0;     // of a sequence, the step's own included
  int64_t draws = 0;    // tokens of one submit_sample(); at least as many as rows
};

// Of a warm-up: kinds of steps that were run of those that there are.
struct WarmUp {
  int done = 0;
  int of = 0;  // 0: nothing to warm up
  double seconds = 0;
};

class Model {
 public:
  virtual ~Model() = default;
  virtual int vocab() const = 0;
  virtual int max_context() const = 0;
  virtual const std::string& fingerprint() const = 0;
  virtual const std::vector<CacheGroup>& groups() const = 0;
  virtual size_t weight_bytes() const = 0;
  virtual Context& context() = 0;

  // Has the memory of any such step ready, so that none allocates. Called once, before
  // allocate_pages. On the CPU memory grows with the steps.
  virtual void reserve(const StepLimits&) {}
  // Bytes of the device's memory that nobody has; 0 on the CPU, whose memory is everybody's.
  virtual int64_t free_bytes() const { return 0; }
  // Allocates `pages` pages for every group; called once, before the first forward.
  virtual void allocate_pages(int64_t pages) = 0;
  // Runs steps of the kinds that there can be, for at most about `seconds`, so that no request
  // waits for what only first steps need. Called once, behind allocate_pages; pages lose their
  // contents. Throws what a step throws. On the CPU there is nothing to do.
  virtual WarmUp warm_up(const StepLimits&, double) { return {}; }
  // Has the memory of the first `pages` of every group ready, for the system gives it out page by
  // page as it is first used. Any thread, also during forward(); what they hold stays.
  virtual void prepare_pages(int64_t) {}
  // All of a page, copied before a sequence writes where another one still reads.
  virtual void copy_page(int group, int32_t src, int32_t dst) = 0;

  // Who computes, so that equal ids mean equal bits for equal weights: backend, instruction set and
  // revision of the kernels, such as "cpu/avx512_bf16/1".
  virtual const std::string& numerics_fingerprint() const = 0;
  // Pages in the order they are stored in (cache/page_codec.h). Any thread, also during forward(),
  // for pages that nobody else touches meanwhile.
  virtual size_t stored_page_bytes(int group, int count) const = 0;  // of `count` tokens
  virtual void read_page(int group, int32_t page, int count, uint8_t* out) const = 0;
  // The first `count` of the `stored` tokens that `in` has; a sequence may go on behind them.
  virtual void write_page(int group, int32_t page, int count, const uint8_t* in, int stored) = 0;
  void write_page(int group, int32_t page, int count, const uint8_t* in) {
    write_page(group, page, count, in, count);
  }
  // Several of them, whose parts are blocks of host_memory(). Waits for all at once.
  virtual void read_pages(const std::vector<PageTransfer>& transfers) const;
  virtual void write_pages(const std::vector<PageTransfer>& transfers);
  // How many are best moved at a time. Above 1, payloads are best moved from and to where they
  // are, in however many parts; else they are wanted in one.
  virtual int page_batch() const { return 1; }
  virtual HostMemory host_memory() const { return plain_memory(); }

  // Runs one step. `logits` [sample_rows, vocab] float32, owned by the caller. Returns false, with
  // the step to be treated as not run, when `cancel` was requested between two layers (null:
  // never). KV of the step's tokens may be written to its pages either way. A page is handed out as
  // its last owner left it, and a sequence writes its slots in order from the first: what a slot
  // held before must not reach a result, not even as a NaN times a weight of zero.
  virtual bool forward(const StepBatch& batch, float* logits, const StepCancel* cancel) = 0;

  // Whether a step is submitted by one call and waited for by another. Then forward() without
  // `logits` does not wait, they stay with the model until the next forward(), and submit_sample()
  // follows, for no row at least. A next step may be submitted before the tokens of this one are
  // read, so that two are under way.
  virtual bool asynchronous() const { return false; }
  // Draws a token from each of `rows`, of the step that was submitted last. rows[i].out is i.
  virtual void submit_sample(const DeviceSampleRow* rows, int64_t count);
  // Waits for the oldest submit_sample() that was not read: its tokens, -1 where SampleJob::finite
  // would be false.
  virtual void read_tokens(int32_t* tokens);
  // Of tokens of the last submit_sample(): their log-probabilities, and those of the likeliest
  // ones. rows[i].drawn is an index into its rows, rows[i].out that behind the entries before.
  virtual void submit_logprobs(const DeviceLogprobRow* rows, int64_t count);
  // Waits for the oldest submit_logprobs() that was not read: all its entries.
  virtual void read_logprobs(DeviceLogprob* out);
  // Waits for all that was submitted and forgets it, whatever has become of it.
  virtual void abandon_steps() noexcept {}
  // out [count, vocab]: rows [first, first + count) of those sampled in the last step. Waits.
  virtual void read_logits(int64_t first, int64_t count, float* out);

  // No step follows and no page is used any more: gives back what memory of a device it has. What
  // describes the model stays. On the CPU it goes with the model.
  virtual void give_back() noexcept {}
};

}  // namespace turbomind
